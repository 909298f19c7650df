"""The sequences and next tokens of a call of either delta rule: their rows, their states, and the operation itself."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS
from deltaline_kernels.compat.arguments import EngineRows, check_flag
from deltaline_kernels.compat.delta_inputs import check_beside, check_counts
from deltaline_kernels.compat.recurrence import advance
from deltaline_kernels.compat.rows import LINE_SHIFT
from deltaline_kernels.compat.slots import Slots, advance_slots, check_contents, check_pool, check_slots
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.gated_delta import run_gated_delta
from deltaline_kernels.kda import run_kda
from deltaline_kernels.rows import WAYPOINT_TOKENS, Rows, StateLines


def run_rule(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Do what `gated_delta` does, or `kda` where key channels have decays of their own."""
    run = run_kda if inputs.heads.keyed else run_gated_delta
    run(inputs, lines, rows, o)


def run_sequences(
    inputs: DeltaInputs,
    v: Tensor,
    rows: EngineRows,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    *,
    chunked: bool,
    between: torch.dtype | None = None,
    o: Tensor | None = None,
) -> tuple[Any, ...]:
    """Check `initial_state`, run the rows from it, and return what `chunk_gated_delta_rule` does. Mutates o alone.

    Of chunks there are, behind that, the states before each in the dtype `between`, unless it is None. o: as of
    `new_output`, which makes one where it is None.
    """
    if initial_state is not None:
        names = ("HV", "V", "K") if state_v_first else ("HV", "K", "V")
        sizes = state_sizes(inputs)
        shape = {"N": rows.num_rows, **{name: sizes[name] for name in names}}
        check_beside("initial_state", initial_state, shape, ACTIVATIONS, inputs.device)
        initial_state = initial_state if state_v_first else initial_state.transpose(2, 3)
        if not initial_state[:1].is_contiguous():
            initial_state = initial_state.contiguous()
    n, final = rows.num_rows, None
    if between is not None:
        rows, final = _mark_chunks(rows, inputs)
    elif output_final_state:
        final = new_states(rows, inputs)
    o = advance_rows(inputs, rows, initial_state, final, new_output(inputs, v) if o is None else o, chunked=chunked)
    found = [final if output_final_state else None]
    if final is not None and between is not None:
        # A copy, so that whoever keeps the last states keeps no others.
        found = [final[:n].clone() if output_final_state else None]
        found.append(_states_before(rows, v, initial_state, final[n:]).to(between))
    turned = [states if states is None or state_v_first else states.transpose(-2, -1) for states in found]
    return shape_output(o, v), *turned


def run_pool(
    inputs: DeltaInputs,
    v: Tensor,
    rows: EngineRows,
    pool: Tensor | None,
    slots: Tensor,
    *,
    keep: bool = True,
    between: torch.dtype | None = None,
    o: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Check the `initial_state` and `initial_state_indices` of a call and run its rows in chunks from those slots.

    Mutates o, which is as for `run_sequences`, and if `keep` the slots of rows with tokens. Returns the outputs and the
    states before chunks in the dtype `between`, V first, zero for skipped rows; None if that is None.
    """
    name, n = "initial_state_indices", rows.num_rows
    pool = check_states("initial_state", pool, inputs)
    check_counts(name, slots, n, inputs.device)
    given = Slots(name, pool, slots, keep=keep)
    o = new_output(inputs, v) if o is None else o
    if between is None:
        return shape_output(advance_slots(run_rule, inputs, rows, given, o, chunked=True), v), None
    slots = check_slots(rows, given, inputs.num_tokens).slots
    # What is written is one tensor: states go beside those before chunks first, and the pool is read until then.
    marked, final = _mark_chunks(rows, inputs)
    moved = replace(
        given, keep=True, final_pool=final, final_slots=torch.arange(n, dtype=slots.dtype, device=slots.device)
    )
    o = advance_slots(run_rule, inputs, marked, moved, o, chunked=True)
    states = _states_before(replace(rows, read_line=slots), v, pool, final[n:]).to(between)
    if keep:
        _store_states(inputs, final, pool, slots)
    return shape_output(o, v), states


def _store_states(inputs: DeltaInputs, states: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Write state i to slot `slots[i]` of the pool, unless that is negative, as rows without tokens do: the device
    alone knows which are."""
    nothing = replace(inputs, **{name: getattr(inputs, name)[:0] for name in "qkvab"})
    rows = EngineRows(len(slots), 0, 0, None, None, slots, -1, True, None, moves=True)
    advance(run_rule, nothing, states, rows, written=pool)


def _mark_chunks(rows: EngineRows, inputs: DeltaInputs) -> tuple[EngineRows, Tensor]:
    """Return the rows with waypoints, and room for their last states, fp32, with that for the waypoints behind."""
    num_marks = inputs.num_tokens // WAYPOINT_TOKENS + rows.num_rows
    lines = torch.arange(num_marks, dtype=torch.int32, device=inputs.device) + rows.num_rows + LINE_SHIFT
    return replace(rows, waypoints=lines), new_states(rows, inputs, more=num_marks)


def _states_before(rows: EngineRows, v: Tensor, initial: Tensor | None, marks: Tensor) -> Tensor:
    """Return the state before each chunk of each row, `[batch, chunks, HV, V, K]`, of those behind whole chunks as
    waypoints lie. Zero for rows whose `read_line` is below 0. Waits for the device where `rows.starts` tells how many
    chunks there are."""
    batch, length = v.shape[:2]
    starts, num_chunks = rows.starts, None
    if starts is None:
        starts = torch.arange(batch + 1, device=v.device) * length
        num_chunks = batch * -(-length // WAYPOINT_TOKENS)
    counts = (starts.diff() + WAYPOINT_TOKENS - 1) // WAYPOINT_TOKENS
    row = torch.repeat_interleave(counts, output_size=num_chunks)
    chunk = torch.arange(len(row), device=v.device) - (counts.cumsum(0) - counts)[row]
    found = marks[starts[row] // WAYPOINT_TOKENS + row + chunk - 1]
    line = row if rows.read_line is None else rows.read_line[row]
    first = torch.zeros_like(found) if initial is None else initial[line.clamp(min=0)].float()
    found = torch.where(chunk[:, None, None, None] > 0, found, first)
    if rows.read_line is not None:
        found.masked_fill_((line < 0)[:, None, None, None], 0.0)
    return found.view(batch, len(row) // max(batch, 1), *marks.shape[1:])


def advance_rows(
    inputs: DeltaInputs,
    rows: EngineRows,
    initial: Tensor | None,
    final: Tensor | None,
    o: Tensor,
    *,
    chunked: bool = False,
) -> Tensor:
    """Run row i from state i of `initial`, None for zero, write its last state to `final` if there is one; return o."""
    if inputs.device.type == "cpu":
        check_contents(rows, inputs.num_tokens)
    moves = final is not None and final is not initial
    rows = replace(rows, history=initial is not None, moves=moves)
    written = final if moves and initial is not None else None
    state = initial if initial is not None else final
    if state is None:
        # Neither read nor written.
        state = torch.empty((0, *state_sizes(inputs).values()), dtype=torch.float32, device=inputs.device)
    keep = final is not None
    return advance(run_rule, inputs, state, rows, written=written, keep=keep, chunked=chunked, o=o)


def new_output(inputs: DeltaInputs, v: Tensor) -> Tensor:
    """Return room for the outputs, `[T, HV, V]` in v's dtype, or in fp32 where that is fp64."""
    return inputs.empty_output(torch.float32 if v.dtype == torch.float64 else v.dtype)


def shape_output(o: Tensor, v: Tensor) -> Tensor:
    """Return o `[T, HV, V]` as `[batch, tokens, HV, V]` in v's dtype."""
    return o.view(*v.shape[:2], *o.shape[1:]).to(v.dtype)


def fake_states_before(k: Tensor, v: Tensor, num_heads: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return a tensor like the states before chunks, V first, in k's dtype: as many as a symbol says where offsets
    tell."""
    num_chunks: Any = -(-v.shape[1] // WAYPOINT_TOKENS)
    if cu_seqlens is not None and not torch.compiler.is_dynamo_compiling():
        num_chunks = torch.library.get_ctx().new_dynamic_size()
    return k.new_empty(v.shape[0], num_chunks, num_heads, v.shape[3], k.shape[3])


def lay_out(v: Tensor, cu_seqlens: Tensor | None, *, joined: bool = False) -> EngineRows:
    """Return the rows of the tokens; they have no lines yet. `joined`: offsets may count those of a batch, one sequence
    behind the other."""
    batch, length = v.shape[:2]
    if cu_seqlens is None:
        return EngineRows(batch, length, length, None, None, None, -1, True, None)
    check_counts("cu_seqlens", cu_seqlens, 1, v.device)
    if batch != 1 and not joined:
        raise ValueError(f"q: expected a batch of 1, as cu_seqlens is given, got {batch}")
    starts = cu_seqlens.contiguous()
    return EngineRows(starts.shape[0] - 1, batch * length, 0, starts, None, None, -1, True, None)


def parse_order(state_v_first: bool | None, transpose_state_layout: bool | None) -> bool:
    """Return whether a state's values come before its keys, as they do if neither flag is given.

    Warns who called the public function of the older name.
    """
    if state_v_first is not None:
        check_flag("state_v_first", state_v_first)
    if transpose_state_layout is None:
        return state_v_first is not False
    check_flag("transpose_state_layout", transpose_state_layout)
    if state_v_first:
        raise ValueError(
            f"transpose_state_layout: expected None, as state_v_first is True, got {transpose_state_layout}"
        )
    # Three below the caller: this function, the public one, and what `operator` puts around that.
    warnings.warn("transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=4)
    return transpose_state_layout


def state_sizes(inputs: DeltaInputs) -> dict[str, int]:
    """Return the dimensions of one state."""
    return {"HV": inputs.heads.num_value_heads, "V": inputs.heads.value_dim, "K": inputs.heads.key_dim}


def new_states(rows: EngineRows, inputs: DeltaInputs, like: Tensor | None = None, more: int = 0) -> Tensor:
    """Return room for a state per row, `[N, HV, V, K]`, and `more` behind them, of the dtype of `like` or fp32."""
    dtype = torch.float32 if like is None else like.dtype
    return torch.empty((rows.num_rows + more, *state_sizes(inputs).values()), dtype=dtype, device=inputs.device)


def check_states(name: str, pool: Tensor | None, inputs: DeltaInputs, num_lines: int | None = None) -> Tensor:
    """Check states that are read or changed where they lie, and return them."""
    return check_pool(name, pool, {"lines": num_lines, **state_sizes(inputs)}, inputs.device)
