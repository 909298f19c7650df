"""The recurrences of Mamba-1 and Mamba2 as inference engines call them: `selective_state_update`.

    h = exp(A dt) h + dt x B^T;  y = h C + D x;  y = y silu(z)

Arguments and their order are those of mamba-ssm and SGLang, with vLLM's offsets and accepted counts behind them. The
channels of all heads are shared out among the groups in their order. Products and sums are fp32, with one rounding at
each store. Nothing waits for a GPU: what index tensors say is checked on the CPU alone.
"""

from collections.abc import Mapping
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
    UnusedMambaSteps,
    check_flag,
    check_indices,
    check_is,
    check_operand,
    check_unused,
    parse_pad,
)
from deltaline_kernels.compat.mamba2_inputs import join_tokens, pack_update
from deltaline_kernels.compat.recurrence import AnyInputs, Operation, advance
from deltaline_kernels.compat.slots import Slots, advance_slots, check_contents, check_pool
from deltaline_kernels.mamba1 import run_mamba1
from deltaline_kernels.mamba1.inputs import ScanInputs
from deltaline_kernels.mamba2 import run_mamba2
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.operators import operator


def _fake(x: Tensor, out: Tensor | None, **_: Any) -> Tensor:
    return x.new_empty(x.shape) if out is None else out


@operator(
    _fake,
    mutates=["state", "out", "final_state", "intermediate_states_buffer"],
    unused=partial(check_unused, kind=UnusedMambaSteps),
)
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
    dst_state_batch_indices: Tensor | None = None,
    final_state: Tensor | None = None,
    null_block_id: int | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None,
    intermediate_state_indices: Tensor | None = None,
    **unused: Unpack[UnusedMambaSteps],
) -> Tensor:
    """Run the next token of each row, or with cu_seqlens or four dimensions its next tokens, one by one.

    Args:
        state: `[slots, nheads, dim, dstate]`, any of the three dtypes, packed states at any distance. Mutated, unless
            there is another final_state: the slots of rows with tokens, each rounded when it is stored. dstate is at
            most 256.
        x: `[batch, nheads, dim]` fp32, bf16 or fp16; a batch of tokens where cu_seqlens is given. Or, as Mamba-1 layers
            have it, `[batch, dim]`: then nothing else has a dimension of heads, and B and C need none of groups. Or
            `[batch, T, nheads, dim]`, T tokens of each row, without cu_seqlens: dt, B, C, z and out have T there, too.
        dt: as x, any of the three dtypes.
        A: `[nheads, dim, dstate]`, any of the three dtypes. Where A, dt, D and dt_bias are expanded from one value per
            head (stride 0), and dim is at most 256, the recurrence is that of Mamba2, else that of Mamba-1.
        B, C: `[batch, ngroups, dstate]`, any of the three dtypes. For Mamba2 columns x, B, C of one tensor are used
            where they are, others are copied, to fp32 if not all alike.
        D, dt_bias: `[nheads, dim]`, any of the three dtypes.
        z: as x, any of the three dtypes; for Mamba2 it costs a few launches more.
        dt_softplus: the time step is softplus(dt + dt_bias), not dt + dt_bias itself.
        state_batch_indices: `(N,)` or `(N, columns)`, the slot of each row, that of the first column; None: row i has
            slot i. A row with a negative slot or `pad_slot_id` is skipped: its outputs are zero, no slot is touched.
            Slot 0 is an ordinary one unless pad_slot_id is 0.
        num_accepted_tokens: `(N,)`, with `(N, columns)` indices only: row i begins with slot
            indices[i, accepted - 1], counts outside 1..columns being the nearest of these, and the state after its
            token t goes to slot indices[i, t]. A row with such a slot for a token, or with more tokens than columns, is
            skipped (the CPU refuses the latter).
        cu_seqlens: `(N+1,)` int32 or int64, the first token of each row and the end of the last. It may have more
            entries of indices and counts beside it than rows, which are not read.
        out: as x of any of the three dtypes, contiguous; None: a new tensor.
        dst_state_batch_indices: as state_batch_indices, beside it, and of as many dimensions: the slots that states go
            to, in place of those that they come from. A negative one, or pad_slot_id, keeps no state.
        final_state: as state, of its dtype or another, and in other memory, unless it is `state`. Mutated in its place,
            which is only read then.
        null_block_id: takes the place of `pad_slot_id` where it is given.
        disable_state_update: no state is kept; not beside slots to write, a final_state or num_accepted_tokens.
        intermediate_states_buffer: `[entries, steps, nheads, dim, dstate]`, any of the three dtypes, contiguous, beside
            state_batch_indices, and without what disable_state_update is not beside. Mutated: the state after token t
            of row i goes to `[entry, t]`. Unless disable_state_update is True this costs a second run.
        cache_steps: None, or the steps of the buffer. intermediate_state_indices: `(N,)` int32 or int64, the entry of
            each row, which keeps nothing below 0; None: its slot. Neither is read without a buffer.
        unused: what engines pass, and changes nothing (`UnusedMambaSteps`).

    A row without tokens changes nothing, but that its state, too, goes where states go, if that is elsewhere.

    Returns:
        y as x, or `out`; unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused, UnusedMambaSteps)
    check_flag("disable_state_update", disable_state_update)
    steps, targets = intermediate_states_buffer, dst_state_batch_indices
    if disable_state_update or steps is not None:
        beside = "disable_state_update" if steps is None else "intermediate_states_buffer"
        refused = {"dst_state_batch_indices": targets, "final_state": final_state}
        _refuse(refused | {"num_accepted_tokens": num_accepted_tokens}, beside)
    pad_slot_id = parse_pad(pad_slot_id, null_block_id)
    if out is None and isinstance(x, Tensor):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y, pool, target, length = out, state, final_state, 1
    if isinstance(x, Tensor) and x.ndim == 4:
        _refuse({"cu_seqlens": cu_seqlens}, "x (batch, T, nheads, dim)")
        length = x.shape[1]
        heads = dict(zip(("batch", "T", "nheads", "dim"), x.shape, strict=True))
        groups = {"batch": x.shape[0], "T": length, "ngroups": None, "dstate": None}
        check_operand("out", out, heads, device=x.device, contiguous=True)
        dt, z, y = join_tokens({"dt": dt, "z": z, "out": out}, heads)
        B, C = join_tokens({"B": B, "C": C}, groups)
        x = x.flatten(0, 1)
    elif isinstance(x, Tensor) and x.ndim == 2:
        x, dt, z, y = (_unsqueeze(part, 2, 1) for part in (x, dt, z, out))
        B, C = (_unsqueeze(part, 2, 1) for part in (B, C))
        A, D, dt_bias = _unsqueeze(A, 2, 0), _unsqueeze(D, 1, 0), _unsqueeze(dt_bias, 1, 0)
        pool = _unsqueeze(state, 3, 1)
        target = pool if final_state is state else _unsqueeze(final_state, 3, 1)
    inputs = pack_update(x, dt, A, B, C, D, z, dt_bias, softplus=dt_softplus)
    device = x.device
    sizes = {"nheads": x.shape[1], "dim": x.shape[2], "dstate": A.shape[2]}
    check_pool("state", pool, {"slots": None, **sizes}, device)
    if target is not None:
        check_pool("final_state", target, {"slots": None, **sizes}, device)
    if steps is not None:
        shape = {"entries": None, "steps": cache_steps, **sizes}
        check_operand("intermediate_states_buffer", steps, shape, STATES, device, contiguous=True)
    check_operand(
        "out", y, {"batch": x.shape[0], "nheads": x.shape[1], "dim": x.shape[2]}, device=device, contiguous=True
    )
    rows = _lay_out(x.shape[0], length, cu_seqlens, device)
    if state_batch_indices is None:
        for name, given in (("state", pool), ("final_state", target)):
            if given is not None and given.shape[0] < rows.num_rows:
                wanted = f"at least {rows.num_rows} slots, one for each row"
                raise ValueError(f"{name}: expected {wanted}, got {given.shape[0]}")
    if isinstance(inputs, ScanInputs):
        flat = pool.flatten(1, 2)
        target = flat if target is pool else None if target is None else target.flatten(1, 2)
        pool, steps = flat, None if steps is None else steps.flatten(2, 3)
    if steps is not None:
        told = _find_steps(pool, steps, state_batch_indices, intermediate_state_indices, pad_slot_id, rows.num_rows)
        _update(inputs, rows, pool, told.final_pool, told, z, y)
        if disable_state_update:
            return out
    keep = not disable_state_update
    if state_batch_indices is None and not keep:
        state_batch_indices = torch.arange(rows.num_rows, dtype=torch.int32, device=device)
    slots = _find_slots(pool, target, state_batch_indices, targets, num_accepted_tokens, pad_slot_id, keep)
    _update(inputs, rows, pool, target, slots, z, y)
    return out


def _refuse(given: Mapping[str, object], beside: str) -> None:
    """Raise ValueError for an argument that may not stand beside another one."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: expected None beside {beside}, got {type(value).__name__}")


def _unsqueeze(part: Any, ndim: int, at: int) -> Any:
    """Return a tensor of so many dimensions with one more; what is none of these is left to the checks."""
    return part.unsqueeze(at) if isinstance(part, Tensor) and part.ndim == ndim else part


def _update(
    inputs: MambaInputs | ScanInputs,
    rows: EngineRows,
    state: Tensor,
    final_state: Tensor | None,
    slots: Slots | None,
    z: Tensor | None,
    y: Tensor,
) -> None:
    """Run the rows; write to y `[T, H, P]`. Mutates the states."""
    if isinstance(inputs, ScanInputs):
        _run(run_mamba1, inputs, rows, state, final_state, slots, y.flatten(1))
    elif z is None:
        _run(run_mamba2, inputs, rows, state, final_state, slots, y)
    else:
        wide = torch.empty(y.shape, dtype=torch.float32, device=y.device)
        _run(run_mamba2, inputs, rows, state, final_state, slots, wide)
        # Of a skipped row z may be anything, too.
        y.copy_(torch.where(wide == 0, wide, wide * F.silu(z.float())))


def _run(
    run: Operation[AnyInputs],
    inputs: AnyInputs,
    rows: EngineRows,
    state: Tensor,
    final_state: Tensor | None,
    slots: Slots | None,
    y: Tensor,
) -> None:
    """Run the rows; write to y, `[T, H, P]` or `[T, D]`. Mutates the states."""
    if slots is not None:
        advance_slots(run, inputs, rows, slots, y)
        return
    if inputs.device.type == "cpu":
        check_contents(rows, inputs.num_tokens)
    written = None if final_state is state else final_state
    advance(run, inputs, state, replace(rows, moves=written is not None), written=written, o=y)


def _find_steps(
    state: Tensor, steps: Tensor, slots: Tensor | None, entries: Tensor | None, pad: int, num_rows: int
) -> Slots:
    """Return slots whose rows leave the state after token t in `steps[entry, t]`, and `state` as it is."""
    names = ("state_batch_indices", "intermediate_state_indices", "intermediate_states_buffer")
    if slots is None:
        raise ValueError(f"{names[0]}: expected a tensor beside {names[2]}, got None")
    slots = check_indices(names[0], _first_column(names[0], slots), state.device, num_rows, more=True)[:num_rows]
    if entries is None:
        entries = slots
    else:
        entries = check_indices(names[1], entries, state.device, num_rows, more=True)[:num_rows]
    count = steps.shape[1]
    lines = entries[:, None].to(torch.int64) * count + torch.arange(count, device=state.device)
    # The number that is none among the slots may be one of these lines.
    begins = torch.where(slots == pad, -1, slots)[:, None]
    return Slots(names[0], state, begins, steps.flatten(0, 1), lines, names[2])


def _find_slots(
    state: Tensor,
    final_state: Tensor | None,
    slots: Tensor | None,
    targets: Tensor | None,
    accepted: Tensor | None,
    pad: int,
    keep: bool,
) -> Slots | None:
    """Return what the indices say, or None if there are none."""
    names = ("state_batch_indices", "dst_state_batch_indices")
    if slots is None:
        given = {names[1]: targets, "num_accepted_tokens": accepted}
        check_is(None, f"as {names[0]} is not given", **given)
        return None
    if accepted is None:
        slots = _first_column(names[0], slots)
        targets = None if targets is None else _first_column(names[1], targets)
    return Slots(names[0], state, slots, final_state, targets, names[1], accepted, pad, keep)


def _first_column(name: str, slots: Tensor) -> Tensor:
    """Return `(N,)` slots as they are, and of a table the first column."""
    if not isinstance(slots, Tensor) or slots.ndim != 2:
        return slots
    if slots.shape[1] < 1:
        raise ValueError(f"{name}: expected at least 1 column, got 0")
    return slots[:, 0]


def _lay_out(num_tokens: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> EngineRows:
    """Return the rows of the tokens, of `length` tokens each unless offsets tell; they have no slots yet."""
    if cu_seqlens is None:
        return EngineRows(num_tokens // max(length, 1), length, length, None, None, None, -1, True, None)
    check_operand("cu_seqlens", cu_seqlens, {"rows + 1": None}, INTEGERS, device)
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens: expected at least 1 entry, got 0")
    return EngineRows(cu_seqlens.shape[0] - 1, num_tokens, 0, cu_seqlens.contiguous(), None, None, -1, True, None)
