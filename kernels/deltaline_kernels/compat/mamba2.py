"""The Mamba2 recurrence as inference engines call it: `selective_state_update`.

    h = exp(A dt) h + dt x B^T;  y = h C + D x;  y = y silu(z)

Arguments and their order are those of mamba-ssm and SGLang, with vLLM's offsets and accepted counts behind them. Head h
uses group h // (nheads / ngroups). Products and sums are fp32, with one rounding at each store. Nothing waits for a
GPU: what index tensors say is checked on the CPU alone.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.checks import STATES
from deltaline_kernels.compat.arguments import (
    INTEGERS,
    EngineRows,
    UnusedSteps,
    check_indices,
    check_operand,
    check_unused,
    parse_pad,
)
from deltaline_kernels.compat.mamba2_inputs import pack_head_values, pack_mamba
from deltaline_kernels.compat.recurrence import advance
from deltaline_kernels.compat.slots import advance_table, check_contents
from deltaline_kernels.mamba2 import run_mamba2
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.operators import operator


def _fake(x: Tensor, out: Tensor | None, **_: Any) -> Tensor:
    return x.new_empty(x.shape) if out is None else out


@operator(_fake, mutates=["state", "out"], unused=partial(check_unused, kind=UnusedSteps))
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    *,
    null_block_id: int | None = None,
    **unused: Unpack[UnusedSteps],
) -> Tensor:
    """Run the next token of each row, or with cu_seqlens its next tokens, one by one.

    Args:
        state: `[slots, nheads, dim, dstate]` fp32 or bf16, contiguous. Mutated: the slots of rows with tokens, rounded
            once per row, or with num_accepted_tokens once per token. dim and dstate are at most 256.
        x: `[batch, nheads, dim]` fp32, bf16 or fp16; a batch of tokens where cu_seqlens is given.
        dt: as x, expanded from one value per head (stride 0), any of the three dtypes.
        A: `[nheads, dim, dstate]`, at most 0, expanded from one value per head, any of the three dtypes.
        B, C: `[batch, ngroups, dstate]`, any of the three dtypes. Columns x, B, C of one tensor are used where they
            are, others are copied, to fp32 if not all alike.
        D, dt_bias: `[nheads, dim]`, expanded from one value per head, any of the three dtypes.
        z: as x, any of the three dtypes; costs a few launches more.
        dt_softplus: the time step is softplus(dt + dt_bias), not dt + dt_bias itself.
        state_batch_indices: `(N,)` or `(N, columns)`, the slot of each row, that of the first column; None: row i has
            slot i. A row with a negative slot or `pad_slot_id` is skipped: its outputs are zero, no slot is touched.
            Slot 0 is an ordinary one unless pad_slot_id is 0.
        num_accepted_tokens: `(N,)`, with `(N, columns)` indices only: row i begins with slot
            indices[i, accepted - 1], counts outside 1..columns being the nearest of these, and the state after its
            token t goes to slot indices[i, t]. A row with such a slot for a token, or with more tokens than columns, is
            skipped (the CPU refuses the latter). It costs two launches and a pass over the states for each token of a
            row; with cu_seqlens for each column, and a copy of the tokens.
        cu_seqlens: `(N+1,)` int32 or int64, the first token of each row and the end of the last. It may have more
            entries of indices and counts beside it than rows, which are not read.
        out: as x of any of the three dtypes, contiguous; None: a new tensor.
        null_block_id: takes the place of `pad_slot_id` where it is given.
        unused: what engines pass, and changes nothing (`UnusedSteps`).

    Returns:
        y as x, or `out`; unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused, UnusedSteps)
    pad_slot_id = parse_pad(pad_slot_id, null_block_id)
    inputs = pack_mamba(x, dt, A, B, C, dt_bias, softplus=dt_softplus)
    heads, device = inputs.heads, x.device
    sizes = {"nheads": heads.num_heads, "dim": heads.head_dim, "dstate": heads.state_dim}
    check_operand("state", state, {"slots": None, **sizes}, STATES, device, contiguous=True)
    per_token = {"batch": x.shape[0], "nheads": heads.num_heads, "dim": heads.head_dim}
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=device)
    else:
        check_operand("out", out, per_token, device=device, contiguous=True)
    if D is not None:
        inputs = replace(inputs, D=pack_head_values("D", D, x))
    rows = _lay_out(x.shape[0], cu_seqlens, device)
    if z is None:
        return _run(inputs, state, rows, state_batch_indices, num_accepted_tokens, pad_slot_id, out)
    check_operand("z", z, per_token, device=device)
    wide = torch.empty(x.shape, dtype=torch.float32, device=device)
    y = _run(inputs, state, rows, state_batch_indices, num_accepted_tokens, pad_slot_id, wide)
    # Of a skipped row z may be anything, too.
    return out.copy_(torch.where(y == 0, y, y * F.silu(z.float())))


def _run(
    inputs: MambaInputs,
    state: Tensor,
    rows: EngineRows,
    slots: Tensor | None,
    accepted: Tensor | None,
    pad: int,
    y: Tensor,
) -> Tensor:
    """Check the rest of the arguments and run the rows; write to y `[T, H, P]` and return it. Mutates `state`."""
    n, device, num_tokens = rows.num_rows, inputs.device, inputs.num_tokens
    is_table = isinstance(slots, Tensor) and slots.ndim == 2
    if accepted is not None:
        if not is_table:
            raise ValueError("num_accepted_tokens: expected None, as state_batch_indices is no table, got a tensor")
        check_indices("num_accepted_tokens", accepted, device, n, more=True)
        accepted = accepted[:n]
    if slots is None:
        if state.shape[0] < n:
            raise ValueError(f"state: expected at least {n} slots, one for each row, got {state.shape[0]}")
        if device.type == "cpu":
            check_contents(rows, num_tokens)
        return advance(run_mamba2, inputs, state, rows, o=y)
    name = "state_batch_indices"
    if is_table:
        check_operand(name, slots, {"rows": None, "columns": None}, INTEGERS, device)
        if slots.shape[0] < n or slots.shape[1] < 1:
            raise ValueError(f"{name}: expected at least {n} rows and 1 column, got {tuple(slots.shape)}")
    else:
        check_indices(name, slots, device, n, more=True)
    slots = slots[:n] if accepted is not None or not is_table else slots[:n, 0]
    # Below 0 is the one way of the rest to say that a row is skipped.
    slots = slots if pad < 0 else slots.masked_fill(slots == pad, -1)
    if device.type == "cpu":
        check_contents(rows, num_tokens, name, slots, state.shape[0], accepted)
    if accepted is None:
        return advance(run_mamba2, inputs, state, replace(rows, read_line=slots, write_line=slots), o=y)
    return y.copy_(advance_table(run_mamba2, inputs, state, rows, slots, accepted, dtype=y.dtype))


def _lay_out(num_tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> EngineRows:
    """Return the rows of the tokens; they have no slots yet."""
    if cu_seqlens is None:
        return EngineRows(num_tokens, 1, 1, None, None, None, -1, True, None)
    check_operand("cu_seqlens", cu_seqlens, {"rows + 1": None}, INTEGERS, device)
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens: expected at least 1 entry, got 0")
    return EngineRows(cu_seqlens.shape[0] - 1, num_tokens, 0, cu_seqlens.contiguous(), None, None, -1, True, None)
