"""The engines' causal convolution against a plain one. Whatever must not be read is NaN, and must be NaN afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rigs.kernels.draws import ints, normal
from rigs.kernels.field_conv1d import field_prefill, field_update
from rigs.kernels.graphs import check_replay
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import causal_conv1d_fn, causal_conv1d_update

DIM = 24
NUM_LINES = 9


@dataclass(frozen=True)
class Prefill:
    """Sequences of `causal_conv1d_fn`; `lines` None: sequence i has line i; `history` None: no sequence has any."""

    lengths: Sequence[int]
    lines: Sequence[int] | None
    history: Sequence[bool] | None
    width: int = 4
    spare: int = 0
    gap: int = 0
    pad: int = -1
    bias: bool = True
    activation: bool | str | None = "silu"
    stateless: bool = False
    by_channel: bool = False
    more: int = 0


@dataclass(frozen=True)
class Update:
    """Rows of `causal_conv1d_update`; `writes` None: the lines that are read."""

    lengths: Sequence[int]
    reads: Sequence[int]
    writes: Sequence[int] | None = None
    accepted: Sequence[int] | None = None
    width: int = 4
    spare: int = 0
    gap: int = 0
    pad: int = -1
    bias: bool = True
    activation: bool | str | None = "silu"
    by_channel: bool = False
    more: int = 0


PREFILLS = {
    "every-argument": Prefill([3, 9, 1, 70], [4, 1, 7, 2], [True, False, True, True]),
    "no-history-told": Prefill([5, 2], [3, 1], None),
    "no-indices": Prefill([1, 4, 8], None, [True, True, False]),
    "no-indices-beside-a-pad": Prefill([1, 4, 8], None, [True, True, False], pad=1),
    "no-states": Prefill([4, 1, 66], None, None, stateless=True),
    "no-states-but-padding": Prefill([4, 1, 3], [1, -1, 2], None, stateless=True),
    "shorter-than-the-history": Prefill([1, 2, 1, 2], [1, 2, 3, 4], [True, True, False, False]),
    "empty": Prefill([0, 3, 0, 0, 2, 0], [1, 2, 3, 4, 5, 6], [True, True, False, True, False, True]),
    "only-empty": Prefill([0, 0], [1, 2], [True, False]),
    "no-sequences": Prefill([], [], []),
    "ends-of-pieces": Prefill([63, 1, 64, 65, 127], [1, 2, 3, 4, 5], [True, True, False, True, False]),
    "wide-lines-in-pages": Prefill([2, 17, 1], [6, 2, 4], [True, True, False], spare=3, gap=13),
    "entries-behind": Prefill([3, 9], [4, 1], [True, False], more=3),
    "channels-first": Prefill([3, 9, 1, 0, 130, 2], [4, 1, 7, 2, -1, 5], [True] * 6, by_channel=True),
    "channels-first-in-pages": Prefill([2, 70], [6, 2], [True, False], spare=3, gap=13, by_channel=True),
    # SGLang #23353: -1 was taken for the last line.
    "padding": Prefill([2, 5, 1, 1], [-1, 3, -1, 8], [True, True, False, True]),
    "padding-of-7": Prefill([2, 5, 1], [7, 3, -2], [True, True, True], pad=7),
    "padding-of-0": Prefill([2, 5, 70], [0, 3, 0], [True, True, False], pad=0),
    "no-bias-no-activation": Prefill([3, 6], [1, 2], [True, False], bias=False, activation=None),
    "activation-true": Prefill([3], [1], [True], activation=True),
    "activation-swish": Prefill([3], [1], [True], activation="swish"),
    "activation-false": Prefill([3], [1], [True], activation=False),
    **{f"width-{w}": Prefill([1, w, 20], [1, 2, 3], [True, True, False], width=w, spare=1) for w in (2, 3, 5, 6)},
}

UPDATES = {
    "decode": Update([1] * 5, [4, 1, 7, 2, 5]),
    "wide-lines-in-pages": Update([1] * 3, [4, 1, 7], spare=3, gap=13),
    "entries-behind": Update([1] * 3, [4, 1, 7], more=2),
    "channels-first": Update([1] * 5, [4, 1, 7, -1, 5], by_channel=True),
    "channels-first-in-pages": Update([4] * 3, [4, 1, 7], accepted=[2, 4, 1], spare=4, gap=13, by_channel=True),
    "channels-first-many": Update([9] * 2, [4, 1], spare=2, by_channel=True),
    "padding": Update([1] * 4, [-1, 3, -1, 8]),
    "padding-of-0": Update([1] * 4, [0, 3, 0, 1], pad=0),
    "several-tokens": Update([5] * 3, [4, 1, 7]),
    "as-many-as-the-history": Update([3] * 2, [4, 1]),
    "many-tokens": Update([9] * 2, [4, 1], spare=2),
    "ragged": Update([1, 3, 0, 2, 8, 1], [4, 1, 7, 2, 5, -1]),
    "ragged-and-long": Update([1, 12, 0, 2], [4, 1, 7, 2], spare=1),
    "speculative": Update([4] * 5, [4, 1, 7, 2, 5], accepted=[0, 1, 2, 3, 4], spare=3),
    "speculative-ragged": Update([4, 1, 0, 2, 3, 2], [4, 1, 8, 2, 5, -1], accepted=[4, 2, 3, 1, 0, 1], spare=4, gap=5),
    "speculative-long": Update([10, 1, 0, 3], [4, 1, 7, 2], accepted=[10, 9, 1, 5], spare=10),
    "speculative-many": Update([10] * 3, [4, -1, 8], accepted=[10, 1, 5], spare=9),
    # vLLM #55178: padding whose counts are left over advanced another's line.
    "speculative-padding-of-0": Update([4] * 4, [2, 0, 0, 0], accepted=[2, 4, 1, 2], spare=3, pad=0),
    "other-lines": Update([1] * 4, [4, 1, 7, -1], [5, 2, 7, 3]),
    "other-lines-speculative": Update([3] * 4, [4, 1, 7, 2], [5, 2, 7, -1], accepted=[3, 1, 2, 1], spare=2),
    "one-read-by-many": Update([2] * 3, [4, 4, 4], [5, 2, 7]),
    "other-lines-padding-of-0": Update([1] * 4, [4, 0, 7, 0], [5, 2, 0, 0], pad=0),
    **{f"width-{w}": Update([1, 3], [1, 2], accepted=[2, 3], width=w, spare=2) for w in (2, 3, 5, 6)},
}


def make_states(
    width: int, spare: int, gap: int, history: dict[int, int], dtype: torch.dtype, *, by_channel: bool = False
) -> Tensor:
    """Return states `(lines, dim, columns)` in pages with a gap: NaN but in the first `history[line]` columns.

    The channels of a column lie together, or `by_channel` the columns of a channel.
    """
    columns = width - 1 + spare
    pages = torch.full((NUM_LINES, columns * DIM + gap), torch.nan, dtype=dtype)
    strides = (columns, 1) if by_channel else (1, DIM)
    states = pages.as_strided((NUM_LINES, DIM, columns), (pages.stride(0), *strides))
    for line, filled in history.items():
        states[line, :, :filled] = normal(filled, DIM, seed=line).t().to(dtype)
    return states


def on_device(states: Tensor, device: str) -> Tensor:
    """Return a copy of states on the device with the strides they have."""
    pages = torch.full((NUM_LINES, states.stride(0)), torch.nan, dtype=states.dtype, device=device)
    return pages.as_strided(states.shape, states.stride()).copy_(states)


def integers(values: Sequence[int] | None, device: str, dtype: torch.dtype = torch.int32) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=dtype, device=device)


def offsets(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Fail unless NaNs are at the same places and the rest is equal."""
    assert torch.equal(got.cpu().nan_to_num(7.0), want.nan_to_num(7.0))


def make_filter(width: int, bias: bool) -> tuple[Tensor, Tensor | None]:
    return normal(DIM, width, seed=98), normal(DIM, seed=99) if bias else None


def check_prefill(
    case: Prefill, device: str, x_dtype: torch.dtype, state_dtype: torch.dtype, index: torch.dtype = torch.int32
) -> None:
    """Run one case, compare its outputs within the tolerance of x's dtype, and the states bit by bit."""
    weight, bias = make_filter(case.width, case.bias)
    starts = offsets(case.lengths)
    lines = list(range(len(case.lengths))) if case.lines is None else list(case.lines)
    pad = -1 if case.lines is None else case.pad
    history = case.history or [False] * len(lines)
    x = normal(starts[-1], DIM + 5).to(x_dtype)
    for i, line in enumerate(lines):
        if line < 0 or line == pad:
            x[starts[i] : starts[i + 1]] = torch.nan
    filled = {line: case.width - 1 for line, has in zip(lines, history, strict=True) if has and line >= 0}
    filled.pop(pad, None)
    states = None
    if not case.stateless:
        states = make_states(case.width, case.spare, case.gap, filled, state_dtype, by_channel=case.by_channel)
    got_states = None if states is None else on_device(states, device)
    got = causal_conv1d_fn(
        x.to(device)[:, :DIM].t(),
        weight.to(device),
        None if bias is None else bias.to(device),
        got_states,
        torch.tensor(starts, dtype=torch.int32, device=device),
        None if case.lines is None else integers([*case.lines, *[0] * case.more], device, index),
        integers(None if case.history is None else [*case.history, *[True] * case.more], device, torch.bool),
        case.activation,
        pad_slot_id=case.pad,
        validate_data=True,
    )
    silu = case.activation not in (None, False)
    want = field_prefill(x[:, :DIM].t(), weight, bias, states, starts, lines, history, silu, pad)
    assert got.dtype == x_dtype and (got.stride(0) == 1 or got.numel() == 0)
    assert_close("y", got, want, x_dtype)
    if states is not None and got_states is not None:
        assert_same_bits(got_states, states)


@pytest.mark.parametrize("case", PREFILLS)
def test_fn_matches_the_reference(path: Path, case: str) -> None:
    check_prefill(PREFILLS[case], path.device, path.dtype, path.dtype)


def check_update(
    case: Update,
    device: str,
    x_dtype: torch.dtype,
    state_dtype: torch.dtype,
    *,
    dense: bool,
    max_query_len: int = -1,
    index: torch.dtype = torch.int32,
    padded: int = 0,
) -> None:
    """Run one case, compare its outputs within the tolerance of x's dtype, and the states bit by bit."""
    weight, bias = make_filter(case.width, case.bias)
    writes = list(case.reads if case.writes is None else case.writes)
    starts = offsets(case.lengths)
    x = normal(starts[-1], DIM + 5).to(x_dtype)[:, :DIM]
    rows = [x[starts[i] : starts[i + 1]].t() for i in range(len(writes))]
    filled = {}
    for i, read in enumerate(case.reads):
        if min(read, writes[i]) < 0 or case.pad in (read, writes[i]):
            rows[i][:] = torch.nan
        else:
            filled[read] = case.width - 1 + (0 if case.accepted is None else max(case.accepted[i] - 1, 0))
    states = make_states(case.width, case.spare, case.gap, filled, state_dtype, by_channel=case.by_channel)
    got_states = on_device(states, device)
    behind = [0] * case.more if dense else []
    indices: dict[str, Any] = {"conv_state_indices": integers([*case.reads, *behind], device, index)}
    if case.writes is not None:
        blocks = torch.full((len(writes), 5), 8, dtype=index)
        blocks[:, 3], blocks[:, 1] = torch.tensor(case.reads), torch.tensor(writes)
        ones = torch.ones(len(writes), dtype=torch.int32, device=device)
        indices = {"conv_state_indices": blocks.to(device), "initial_state_idx": 3 * ones}
        indices["block_idx_last_scheduled_token"] = ones
    if not dense:
        indices["query_start_loc"] = integers(starts + [starts[-1]] * padded, device)
        indices["max_query_len"] = max_query_len
    given = x.to(device)
    if dense and case.lengths[0] > 1:
        given = given.unflatten(0, (len(rows), case.lengths[0])).transpose(1, 2)
    kept = given.clone()
    got = causal_conv1d_update(
        given,
        got_states,
        weight.to(device),
        None if bias is None else bias.to(device),
        case.activation,
        num_accepted_tokens=integers(case.accepted, device),
        pad_slot_id=case.pad,
        validate_data=True,
        **indices,
    )
    assert got.shape == given.shape and got.dtype == x_dtype
    assert_same_bits(given, kept.cpu())
    silu = case.activation not in (None, False)
    want = field_update(rows, states, weight, bias, case.reads, writes, case.accepted, silu, case.pad)
    got = got.transpose(1, 2).flatten(0, 1) if got.ndim == 3 else got
    assert_close("y", got, torch.cat([row.t() for row in want]), x_dtype)
    assert_same_bits(got_states, states)


@pytest.mark.parametrize("case", [name for name, case in UPDATES.items() if len(set(case.lengths)) == 1])
def test_update_matches_the_reference(path: Path, case: str) -> None:
    check_update(UPDATES[case], path.device, path.dtype, path.dtype, dense=True)


# Where the longest row is not known, all of a kind go one way: some of them tell.
UNBOUNDED = ("ragged", "ragged-and-long", "speculative-ragged", "speculative-long", "other-lines-speculative")

RAGGED = [*((name, True) for name in UPDATES), *((name, False) for name in UNBOUNDED)]


@pytest.mark.parametrize(("case", "bounded"), RAGGED)
def test_update_of_ragged_rows_matches_the_reference(path: Path, case: str, bounded: bool) -> None:
    longest = max(UPDATES[case].lengths) if bounded else -1
    check_update(UPDATES[case], path.device, path.dtype, path.dtype, dense=False, max_query_len=longest)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_x_is_rounded_to_the_dtype_of_the_states(device: str, x_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    check_prefill(PREFILLS["every-argument"], device, x_dtype, state_dtype)
    check_update(UPDATES["decode"], device, x_dtype, state_dtype, dense=True)
    check_update(UPDATES["speculative-ragged"], device, x_dtype, state_dtype, dense=False, max_query_len=4)


def test_indices_may_be_int64(exact_path: Path) -> None:
    where, dtype = exact_path.device, exact_path.dtype
    check_prefill(PREFILLS["padding"], where, dtype, dtype, torch.int64)
    check_update(UPDATES["padding"], where, dtype, dtype, dense=True, index=torch.int64)
    check_update(UPDATES["other-lines"], where, dtype, dtype, dense=True, index=torch.int64)


def test_offsets_behind_the_last_row_are_not_read(exact_path: Path) -> None:
    for case in ("speculative-ragged", "speculative-long"):
        check_update(UPDATES[case], exact_path.device, exact_path.dtype, exact_path.dtype, dense=False, padded=3)


def test_lines_may_be_a_column_of_a_table(exact_path: Path) -> None:
    where = exact_path.device
    table = torch.full((3, 4), 8, dtype=torch.int32)
    table[:, 0] = torch.tensor([4, -1, 2])
    before = on_device(make_states(4, 0, 0, {4: 3, 2: 3}, torch.float32), where)
    tokens, weight, results = normal(3, DIM).to(where), normal(DIM, 4).to(where), []
    for lines in (table[:, 0].contiguous().to(where), table.to(where)[:, 0], table.to(where)):
        states = before.clone()
        results.append((causal_conv1d_update(tokens, states, weight, conv_state_indices=lines), states))
    for y, states in results[1:]:
        assert torch.equal(y, results[0][0])
        assert_same_bits(states, results[0][1].cpu())


def test_a_row_without_an_index_has_the_line_of_its_number(exact_path: Path) -> None:
    where = exact_path.device
    weight, states = normal(DIM, 4).to(where), normal(NUM_LINES, 3, DIM).transpose(1, 2).to(where)
    tokens, same = normal(4, DIM).to(where), states.clone()
    got = causal_conv1d_update(tokens, states, weight, pad_slot_id=0)
    want = causal_conv1d_update(tokens, same, weight, conv_state_indices=integers(range(4), where))
    assert torch.equal(got, want) and torch.equal(states, same)


@pytest.mark.parametrize("length", [1, 3, 10])
def test_out_may_be_new_or_strided_or_x(exact_path: Path, length: int) -> None:
    where = exact_path.device
    weight, before = normal(DIM, 4).to(where), normal(NUM_LINES, 3, DIM).transpose(1, 2).to(where)
    lines = integers([3, 5, -1], where)
    x = normal(3, length, DIM).transpose(1, 2).to(where)
    want = causal_conv1d_update(x, before.clone(), weight, None, "silu", lines)
    wide = torch.full((3, length, DIM + 2), torch.nan, device=where)
    outs = [torch.full_like(x, torch.nan), wide[:, :, :DIM].transpose(1, 2), x.contiguous().clone(), x.clone()]
    for out in outs:
        got = causal_conv1d_update(x, before.clone(), weight, None, "silu", lines, out=out)
        assert got is out and torch.equal(out, want)
    for same in (x.clone(), x.clone(memory_format=torch.contiguous_format)):
        assert causal_conv1d_update(same, before.clone(), weight, None, "silu", lines, out=same) is same
        assert torch.equal(same, want)
    assert wide[:, :, DIM:].isnan().all()


def test_any_strides_of_x_give_the_same_update(exact_path: Path) -> None:
    where = exact_path.device
    weight, before = normal(DIM, 4).to(where), normal(NUM_LINES, 3, DIM).transpose(1, 2).to(where)
    x = normal(3, DIM, 2).to(where)
    want = causal_conv1d_update(x.transpose(1, 2).contiguous().transpose(1, 2), before.clone(), weight)
    assert torch.equal(causal_conv1d_update(x, before.clone(), weight), want)
    first = causal_conv1d_update(x[:, :, 0].contiguous(), before.clone(), weight)
    assert torch.equal(causal_conv1d_update(x[:, :, 0], before.clone(), weight), first)


def test_any_strides_of_packed_x_give_the_same_outputs_in_its_order(exact_path: Path) -> None:
    where = exact_path.device
    weight, before = normal(DIM, 4).to(where), normal(NUM_LINES, 3, DIM).transpose(1, 2).to(where)
    starts, lines, history = ints(0, 2, 7).to(where), ints(3, 1).to(where), torch.tensor([True, False]).to(where)
    wide = normal(DIM + 4, 14).to(where)
    for x in (wide[2:-2, :7], wide[2:-2, ::2], normal(7, 2 * DIM).to(where).t()[::2]):
        states, same = before.clone(), before.clone()
        want = causal_conv1d_fn(x.t().contiguous().t(), weight, None, same, starts, lines, history)
        got = causal_conv1d_fn(x, weight, None, states, starts, lines, history)
        assert got.stride() == torch.empty_like(x).stride() and torch.equal(got, want) and torch.equal(states, same)


@pytest.mark.gpu
def test_functions_run_in_a_cuda_graph() -> None:
    """Both read their index tensors on the device: a replay follows what they hold by then."""
    weight, bias = normal(DIM, 4).cuda(), normal(DIM).cuda()
    x, starts = normal(40, DIM).cuda().bfloat16(), ints(0, 30, 40).cuda()
    lines, history, accepted = ints(3, 4).cuda(), torch.tensor([True, False]).cuda(), ints(1, 2).cuda()
    states = normal(NUM_LINES, 6, DIM).cuda().bfloat16().transpose(1, 2)

    def run() -> list[Tensor]:
        drafts = x[:6].unflatten(0, (2, 3)).transpose(1, 2)
        return [
            causal_conv1d_fn(x.t(), weight, bias, states, starts, lines, history),
            causal_conv1d_update(x[:2], states, weight, bias, "silu", lines),
            causal_conv1d_update(drafts, states, weight, bias, "silu", lines, accepted),
            causal_conv1d_update(x[:30], states, weight, bias, "silu", lines, query_start_loc=starts // 2),
        ]

    def change() -> None:
        starts.copy_(ints(0, 4, 40))
        lines.copy_(ints(7, -1))
        history.copy_(torch.tensor([False, True]))
        accepted.copy_(ints(3, 1))
        x.copy_(normal(40, DIM, seed=5))

    check_replay(run, [states], change)


@pytest.mark.gpu
def test_a_plain_update_is_one_launch() -> None:
    weight, states = normal(DIM, 4).cuda(), normal(NUM_LINES, 3, DIM).cuda().transpose(1, 2)
    lines, x = ints(3, 4).cuda(), normal(2, DIM).cuda()
    # Given, since these tests fill what is allocated.
    out = torch.zeros_like(x)
    causal_conv1d_update(x, states, weight, None, "silu", lines, out=out)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        causal_conv1d_update(x, states, weight, None, "silu", lines, out=out)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if str(event.device_type).endswith("CUDA")]
    assert len(kernels) == 1, kernels
