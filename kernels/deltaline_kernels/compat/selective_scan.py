"""The Mamba-1 recurrence as mamba-ssm and vLLM call it: `selective_scan_fn`, and what vLLM calls by that name.

    d = softplus(delta + delta_bias);  h = exp(A d) h + d u B^T;  y = (h C + D u) silu(z)

Argument names and layouts are theirs. Channel i uses group i // (dim / groups). Products and sums are fp32, with one
rounding at each store. Nothing waits for a GPU: what index tensors say is checked on the CPU alone.
"""

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM
from deltaline_kernels.compat.arguments import (
    EngineRows,
    UnusedScan,
    check_flag,
    check_indices,
    check_operand,
    check_unused,
    parse_pad,
)
from deltaline_kernels.compat.delta_inputs import join_columns, pack_rows, widen
from deltaline_kernels.compat.recurrence import advance
from deltaline_kernels.compat.rows import check_contents
from deltaline_kernels.compat.slots import check_pool
from deltaline_kernels.mamba1 import run_mamba1
from deltaline_kernels.mamba1.inputs import ScanInputs, ScanSizes
from deltaline_kernels.operators import operator


def _fake_scan(u: Tensor, A: Tensor, return_last_state: bool, **_: Any) -> Any:
    y = u.transpose(1, 2).new_empty(u.shape[0], u.shape[2], u.shape[1]).transpose(1, 2)
    last = u.new_empty(u.shape[0], *A.shape, dtype=torch.float32)
    return (y, last) if return_last_state else y


@operator(_fake_scan, results=2)
def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run whole sequences of one length, from the zero state.

    Args:
        u, delta, z: `(batch, dim, n)`; A: `(dim, dstate)`, real; B, C: `(batch, dstate, n)` or
            `(batch, groups, dstate, n)`; D, delta_bias: `(dim,)`. Each fp32, bf16 or fp16, of any strides; tokens are
            copied unless their channels are contiguous. dstate is at most 256.
        delta_softplus: False: the time step is delta + delta_bias.

    Returns:
        y as u, channels contiguous, in u's dtype; with return_last_state also `(batch, dim, dstate)` fp32.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_flag("delta_softplus", delta_softplus)
    check_flag("return_last_state", return_last_state)
    check_operand("u", u, {"batch": None, "dim": None, "n": None})
    tokens = {"batch": u.shape[0], "dim": u.shape[1], "n": u.shape[2]}
    inputs = _pack_batch(tokens, u, delta, A, B, C, D, z, delta_bias, softplus=delta_softplus)
    state = torch.empty((u.shape[0], *A.shape), dtype=torch.float32, device=u.device)
    rows = EngineRows(u.shape[0], u.shape[2], u.shape[2], None, None, None, -1, False, None, moves=True)
    y = _by_channel(advance(run_mamba1, inputs, state, rows, chunked=True), u)
    return (y, state) if return_last_state else y


def _fake_slots(u: Tensor, **_: Any) -> Tensor:
    if u.ndim == 2:
        return u.new_empty(u.shape[1], u.shape[0]).t()
    return u.new_empty(u.shape[0], u.shape[2], u.shape[1]).transpose(1, 2)


@operator(_fake_slots, mutates=["ssm_states"], unused=partial(check_unused, kind=UnusedScan))
def selective_scan_varlen(
    u: Tensor,
    ssm_states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    *,
    null_block_id: int | None = None,
    **unused: Unpack[UnusedScan],
) -> Tensor:
    """Run the tokens of each row from the state in its slot, or from zero: vLLM's `selective_scan_fn`.

    Args:
        u, delta, z: `(dim, tokens)` with query_start_loc, else `(batch, dim, n)`; B, C: `(groups, dstate, tokens)` or
            `(dstate, tokens)`, else `(batch, groups, dstate, n)` or `(batch, dstate, n)`; A, D, delta_bias,
            delta_softplus: as in `selective_scan_fn`. None of them is written to.
        ssm_states: `(slots, dim, dstate)`, any of the three dtypes, packed states at any distance. Mutated: the slots
            of rows with tokens.
        query_start_loc: `(N+1,)` int32 or int64, the first token of each row and the end of the last.
        cache_indices: `(N,)` int32 or int64, the slot of each row; None: row i has slot i. A row with a negative one or
            `pad_slot_id` is skipped: its outputs are zero, no slot is touched.
        has_initial_state: `(N,)` bool, whether a row begins with its slot's state; None: none does.
        null_block_id: takes the place of `pad_slot_id` where it is given.
        unused: what engines pass, and changes nothing (`UnusedScan`).

    Returns:
        y as u, channels contiguous, in u's dtype; unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused, UnusedScan)
    check_flag("delta_softplus", delta_softplus)
    pad = parse_pad(pad_slot_id, null_block_id)
    num_rows, starts, length = 0, None, 0
    told = (delta, A, B, C, D, z, delta_bias)
    if query_start_loc is None:
        check_operand("u", u, {"batch": None, "dim": None, "n": None})
        num_rows, dim, length = u.shape
        inputs = _pack_batch({"batch": num_rows, "dim": dim, "n": length}, u, *told, softplus=delta_softplus)
    else:
        check_operand("u", u, {"dim": None, "tokens": None})
        dim = u.shape[0]
        inputs = _pack_batch({"dim": dim, "tokens": u.shape[1]}, u, *told, softplus=delta_softplus)
        starts = check_indices("query_start_loc", query_start_loc, u.device, 1, more=True).contiguous()
        num_rows = starts.shape[0] - 1
    check_pool("ssm_states", ssm_states, {"slots": None, "dim": dim, "dstate": A.shape[1]}, u.device)
    if cache_indices is not None:
        cache_indices = check_indices("cache_indices", cache_indices, u.device, num_rows, more=True)[:num_rows]
    elif ssm_states.shape[0] < num_rows:
        wanted = f"at least {num_rows} slots, one for each row"
        raise ValueError(f"ssm_states: expected {wanted}, got {ssm_states.shape[0]}")
    history: Tensor | bool = False
    if has_initial_state is not None:
        history = check_indices("has_initial_state", has_initial_state, u.device, num_rows, (torch.bool,))
    most = length if starts is None else inputs.num_tokens
    rows = EngineRows(num_rows, most, length, starts, cache_indices, cache_indices, pad, history, None)
    if u.device.type == "cpu":
        check_contents(rows, "cache_indices", inputs.num_tokens, ssm_states.shape[0], 0, 1)
    return _by_channel(advance(run_mamba1, inputs, ssm_states, rows, chunked=True), u)


def pack_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    *,
    softplus: bool,
) -> ScanInputs:
    """Pack checked x, dt, z `[T, D]`, A `[D, S]`, B, C `[T, G, S]` and D, dt_bias `[D]` of any strides.

    Each is used where it is if it is packed and of x's dtype or fp32, else copied.
    """
    (num_tokens, channels), (num_groups, state_dim) = x.shape, B.shape[1:]
    steps, gates = (None if part is None else pack_rows(widen(part, x.dtype), num_tokens, channels) for part in (dt, z))
    rates, skips, biases = (None if part is None else widen(part, x.dtype).contiguous() for part in (A, D, dt_bias))
    assert steps is not None and rates is not None
    return ScanInputs(
        pack_rows(x, num_tokens, channels),
        steps,
        join_columns(widen(B, x.dtype), widen(C, x.dtype)),
        gates,
        rates,
        skips,
        biases,
        ScanSizes(num_groups, channels, state_dim),
        log_rate=False,
        softplus=softplus,
    )


def check_groups(name: str, num_groups: int, channels: int, state_dim: int) -> None:
    """Raise ValueError unless so many groups share so many channels, of states that a kernel takes."""
    if num_groups < 1 or channels < 1 or channels % num_groups:
        raise ValueError(f"{name}: expected a multiple of the {num_groups} groups of B, got {channels} channels")
    if not 1 <= state_dim <= MAX_HEAD_DIM:
        raise ValueError(f"A: expected dstate of 1..{MAX_HEAD_DIM}, got {state_dim}")


def _pack_batch(
    tokens: dict[str, int],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    *,
    softplus: bool,
) -> ScanInputs:
    """Check tokens of these dimensions, the last of which counts them, and pack them."""
    dim, device = tokens["dim"], u.device
    check = partial(check_operand, dtypes=ACTIVATIONS, device=device, beside="u")
    check("delta", delta, tokens)
    if z is not None:
        check("z", z, tokens)
    check("A", A, {"dim": dim, "dstate": None})
    for name, weight in (("D", D), ("delta_bias", delta_bias)):
        if weight is not None:
            check(name, weight, {"dim": dim})
    *batch, _, count = tokens.items()
    by_token = partial(_by_token, batched=bool(batch))
    keys = []
    for name, given in (("B", B), ("C", C)):
        grouped = isinstance(given, Tensor) and given.ndim == len(tokens) + 1
        groups = {"groups": None} if grouped else {}
        key = check(name, given, {**dict(batch), **groups, "dstate": A.shape[1], **dict([count])})
        keys.append(by_token(key if grouped else key.unsqueeze(-3)))
    if keys[0].shape != keys[1].shape:
        raise ValueError(f"C: expected the {keys[0].shape[1]} groups of B, got {keys[1].shape[1]}")
    check_groups("u", keys[0].shape[1], dim, A.shape[1])
    gates = None if z is None else by_token(z)
    return pack_scan(by_token(u), by_token(delta), A, keys[0], keys[1], D, gates, delta_bias, softplus=softplus)


def _by_token(x: Tensor, *, batched: bool) -> Tensor:
    """Return `(..., T)`, or a batch of such, as `[T, ...]`."""
    return x.movedim(-1, 1).flatten(0, 1) if batched else x.movedim(-1, 0)


def _by_channel(y: Tensor, u: Tensor) -> Tensor:
    """Return y `[T, D]` in the shape of u."""
    return y.t() if u.ndim == 2 else y.view(u.shape[0], u.shape[2], u.shape[1]).transpose(1, 2)
