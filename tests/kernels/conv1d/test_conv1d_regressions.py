"""Mistakes that convolutions of inference engines were found to make, one test for each, named after its report.

Numbers are those of reports to the engines' own trackers. Whatever must not be read is NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.kernels.batches import Row, make_batch, plan_rows
from rigs.kernels.field_conv1d import convolve, field_prefill
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import Rows, causal_conv1d
from deltaline_kernels.compat import causal_conv1d_fn, causal_conv1d_update

DIM = 40
WIDTH = 4
HISTORY = WIDTH - 1
MANY = 2**31


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(path: Path, width: int = WIDTH) -> Tensor:
    return normal(DIM, width, seed=99).to(path.device, path.dtype)


def pool(path: Path, columns: int, *used: int) -> Tensor:
    """Return states `(8, dim, columns)`: NaN, but random in the used lines."""
    lines = torch.full((8, columns, DIM), torch.nan)
    for line in used:
        lines[line] = normal(columns, DIM, seed=line)
    return lines.to(path.device, path.dtype).transpose(1, 2)


def ints(path: Path, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=path.device)


def tokens(path: Path, *shape: int, seed: int = 50) -> Tensor:
    return normal(*shape, DIM, seed=seed).to(path.device, path.dtype)


def serial(path: Path, history: Tensor, x: Tensor) -> Tensor:
    """Return the outputs `[n, dim]` of x `[n, dim]` behind history `(dim, width-1)`, by the plain loops."""
    return convolve(history.cpu(), x.t().cpu(), weights(path).cpu(), None, False).t().to(path.device)


def refuses(path: Path) -> bool:
    """Whether lengths are looked at without being asked to: by the CPU path, never by the kernels."""
    return path.device == "cpu" and type(path) is Path


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.gpu
@pytest.mark.parametrize("long_last", [True, False], ids=["long-last", "short-last"])
def test_offsets_of_tokens_beyond_int32(long_last: bool) -> None:
    """vLLM #40905, SGLang #29602: packs of more than 2**31 values wrapped around; about 9 GB."""
    path, dim = Path("cuda", torch.bfloat16), 4096
    last = 200 if long_last else 1
    begin = MANY // dim + 7
    x = torch.zeros((begin + last, dim), dtype=path.dtype, device=path.device)
    x[-last:] = normal(last, dim).to(x)
    weight, states = normal(dim, WIDTH).to(x), torch.zeros((2, HISTORY, dim)).to(x).transpose(1, 2)
    few = states.clone()
    y = causal_conv1d_fn(x.t(), weight, None, states, ints(path, 0, begin, begin + last), ints(path, 0, 1))
    want = causal_conv1d_fn(x[-last:].t(), weight, None, few, ints(path, 0, last), ints(path, 1))
    assert torch.equal(y[:, -last:], want) and torch.equal(states[1], few[1])
    assert want.abs().amax() > 0 and y[:, begin - 5 : begin].abs().amax() == 0
    del y
    lines = torch.zeros((3, HISTORY, dim)).to(x)
    rows = Rows.build([begin, last], [1, 2], [1, 2], [begin, last], [0, 0], [0, 0], max_short=1, device=path.device)
    y = causal_conv1d(x, weight.t().contiguous(), None, lines, rows)
    assert torch.equal(y[-last:].t(), want) and torch.equal(lines[2].t(), few[1])
    del x, y
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_offsets_of_lines_beyond_int32() -> None:
    """vLLM #41617: products of a line and its stride wrapped around; about 4 GB."""
    path, dim = Path("cuda", torch.bfloat16), 64
    pages = torch.zeros(MANY + HISTORY * dim, dtype=path.dtype, device=path.device)
    states = pages.as_strided((3, HISTORY, dim), (MANY // 2, dim, 1)).transpose(1, 2)
    few = normal(1, HISTORY, dim).to(pages).transpose(1, 2)
    states[2] = few[0]
    x, weight, history = normal(100, dim).to(pages), normal(dim, WIDTH).to(pages), torch.tensor([True]).cuda()
    for _ in range(2):
        y = causal_conv1d_fn(x.t(), weight, None, states, ints(path, 0, 100), ints(path, 2), history)
        want = causal_conv1d_fn(x.t(), weight, None, few, ints(path, 0, 100), ints(path, 0), history)
        assert torch.equal(y, want) and torch.equal(states[2], few[0])
        y = causal_conv1d_update(x[:1], states, weight, conv_state_indices=ints(path, 2))
        want = causal_conv1d_update(x[:1], few, weight, conv_state_indices=ints(path, 0))
        assert torch.equal(y, want) and torch.equal(states[2], few[0])
    assert states[:2].abs().amax() == 0
    del pages, states
    torch.cuda.empty_cache()


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_short_chunk_leaves_the_shared_line_alone(exact_path: Path, length: int) -> None:
    """vLLM #56196: a chunk shorter than the history was written to the block that it reads, which others share."""
    states = pool(exact_path, HISTORY, 2)
    before, x = states.clone(), tokens(exact_path, 1, length)
    table, read, write = ints(exact_path, 2, 5)[None], ints(exact_path, 0), ints(exact_path, 1)
    causal_conv1d_update(
        x.transpose(1, 2),
        states,
        weights(exact_path),
        conv_state_indices=table,
        initial_state_idx=read,
        block_idx_last_scheduled_token=write,
    )
    want = torch.cat((before[2], x[0].t()), dim=1)[:, -HISTORY:]
    assert torch.equal(states[5], want)
    states[5] = torch.nan
    assert same_bits(states, before)
    lines = before.transpose(1, 2).clone()
    rows = Rows.build([length], [2], [5], [length], [0], [0], max_short=4, device=exact_path.device)
    exact_path.conv(x[0], weights(exact_path).t().contiguous(), None, lines, rows, None)
    assert torch.equal(lines[5].t(), want) and torch.equal(lines[2].t(), before[2])


def test_empty_rows_leave_their_lines_alone(exact_path: Path) -> None:
    """A sequence of no tokens keeps its state in every mode, also one that is said to have none."""
    path, weight, x = exact_path, weights(exact_path), tokens(exact_path, 2)
    before = pool(path, 6, 1, 2, 3)
    starts, lines = ints(path, 0, 0, 2, 2), ints(path, 1, 2, 3)
    history = torch.tensor([True, True, False], device=path.device)
    runs: list[dict[str, Any]] = [{}, {"num_accepted_tokens": ints(path, 3, 2, 2)}]
    for told in runs:
        for longest in (-1, 2):
            states = before.clone()
            causal_conv1d_update(
                x, states, weight, None, None, lines, query_start_loc=starts, max_query_len=longest, **told
            )
            assert not torch.equal(states[2], before[2])
            states[2] = before[2]
            assert same_bits(states, before)
    states = before.clone()
    causal_conv1d_fn(x.t(), weight, None, states, starts, lines, history)
    assert not torch.equal(states[2], before[2])
    states[2] = before[2]
    assert same_bits(states, before)


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_no_drafts_after_an_accepted_step(exact_path: Path, accepted: int) -> None:
    """vLLM #39273, #40738, #52942: a row without drafts after accepted ones went on from the oldest column."""
    path, weight = exact_path, weights(exact_path)
    states = pool(path, 5, 1)
    history, drafts, after = states[1, :, :HISTORY].clone(), tokens(path, 3), tokens(path, 3, seed=51)
    line, count = ints(path, 1), ints(path, accepted)
    causal_conv1d_update(drafts.t()[None], states, weight, None, None, line, ints(path, 1))
    kept = states.clone()
    causal_conv1d_update(after[:0], states, weight, None, None, line, count, ints(path, 0, 0), max_query_len=3)
    assert same_bits(states, kept)
    first = causal_conv1d_update(after[:1], states, weight, None, None, line, count)
    second = causal_conv1d_update(after[1:].t()[None], states, weight, None, None, line, ints(path, 1))[0].t()
    want = serial(path, history, torch.cat((drafts[:accepted], after)))[accepted:]
    assert_close("y", torch.cat((first, second)), want, path.dtype)


def test_no_tokens_still_fold_accepted_drafts_in(exact_path: Path) -> None:
    """vLLM #56531, where rows say themselves that drafts join the state: they do so without a token of their own."""
    batch = make_batch([Row(0, replayed=2)], exact_path)
    before = batch.lines.clone()
    exact_path.conv(batch.qkv, batch.weight, None, batch.lines, batch.rows)
    assert torch.equal(batch.lines[1, :HISTORY], before[1, 2 : 2 + HISTORY])


@pytest.mark.parametrize("told", [0, -1, -7])
def test_an_accepted_count_below_one_reads_no_other_line(exact_path: Path, told: int) -> None:
    """vLLM #50021: accepted - 1 was taken for a column, also where nothing was accepted: the line before was read."""
    path, x = exact_path, tokens(exact_path, 2, 3).transpose(1, 2)
    states = pool(path, 5, 2, 3)
    same = states.clone()
    states[2, :, -1] = torch.nan
    same[2, :, -1] = torch.nan
    got = causal_conv1d_update(x, states, weights(path), None, None, ints(path, 2, 3), ints(path, told, told))
    want = causal_conv1d_update(x, same, weights(path), None, None, ints(path, 2, 3), ints(path, 1, 1))
    assert got.isfinite().all() and torch.equal(got, want) and same_bits(states, same)


def test_an_accepted_count_above_the_line_reads_no_other_line(exact_path: Path) -> None:
    """vLLM #50021, the other end: the count is clamped to what a line holds."""
    path, x = exact_path, tokens(exact_path, 1, 3).transpose(1, 2)
    states = pool(path, 5, 2)
    same = states.clone()
    got = causal_conv1d_update(x, states, weights(path), None, None, ints(path, 2), ints(path, 90))
    want = causal_conv1d_update(x, same, weights(path), None, None, ints(path, 2), ints(path, 3))
    assert got.isfinite().all() and torch.equal(got, want) and same_bits(states, same)


@pytest.mark.parametrize("length", [1, 4, 12])
def test_more_than_four_drafts(exact_path: Path, length: int) -> None:
    """vLLM #37035: more than four drafts left the memory of the line."""
    path, x = exact_path, tokens(exact_path, length)
    states = pool(path, HISTORY - 1 + length, 3)
    history = states[3, :, :HISTORY].clone()
    got = causal_conv1d_update(x.t()[None], states, weights(path), None, None, ints(path, 3), ints(path, 1))
    assert_close("y", got[0].t(), serial(path, history, x), path.dtype)
    assert torch.equal(states[3], torch.cat((history[:, 1:], x.t()), dim=1))
    assert states[4].isnan().all()


def test_padding_never_writes_the_last_line(exact_path: Path) -> None:
    """SGLang #23353: -1 was taken for the last line of the pool."""
    path, weight = exact_path, weights(exact_path)
    states = pool(path, 5, 7)
    before = states.clone()
    nothing, starts = ints(path, -1, -1), ints(path, 0, 3, 6)
    x = torch.full((6, DIM), torch.nan, device=path.device)
    drafts, history = x.view(2, 3, DIM).transpose(1, 2), torch.tensor([True, False], device=path.device)
    outputs = [
        causal_conv1d_fn(x.t(), weight, None, states, starts, nothing, history),
        causal_conv1d_update(x[:2], states, weight, conv_state_indices=nothing),
        causal_conv1d_update(drafts, states, weight, None, None, nothing, ints(path, 1, 2)),
        causal_conv1d_update(x, states, weight, None, None, nothing, query_start_loc=starts),
    ]
    assert all(bool((y == 0).all()) for y in outputs)
    assert same_bits(states, before)


@pytest.mark.parametrize("pad", [-1, 0])
def test_padding_of_a_graph_advances_no_state(exact_path: Path, pad: int) -> None:
    """vLLM #55178: padding rows of K+1 tokens, whose counts are left over, advanced the state of another's line."""
    path, K = exact_path, 3
    states = pool(path, HISTORY + K, 2)
    alone = states.clone()
    x = torch.full((4, K + 1, DIM), torch.nan, device=path.device)
    x[0] = tokens(path, K + 1)
    lines = ints(path, 2, pad, pad, pad)
    y = causal_conv1d_update(
        x.transpose(1, 2), states, weights(path), None, None, lines, ints(path, 2, 4, 1, 2), pad_slot_id=pad
    )
    want = causal_conv1d_update(x[:1].transpose(1, 2), alone, weights(path), None, None, ints(path, 2), ints(path, 2))
    assert torch.equal(y[0], want[0]) and (y[1:] == 0).all()
    assert same_bits(states, alone)


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_the_line_slides_behind_any_accepted_draft(exact_path: Path, accepted: int) -> None:
    """vllm-xpu-kernels #544: the line was written for each draft instead of sliding once."""
    path, weight = exact_path, weights(exact_path)
    states = pool(path, 6, 1)
    history, drafts, after = states[1, :, :HISTORY].clone(), tokens(path, 4), tokens(path, 1, seed=51)
    causal_conv1d_update(drafts.t()[None], states, weight, None, None, ints(path, 1), ints(path, 1))
    assert torch.equal(states[1], torch.cat((history[:, 1:], drafts.t()), dim=1))
    got = causal_conv1d_update(after, states, weight, None, None, ints(path, 1), ints(path, accepted))
    want = serial(path, history, torch.cat((drafts[:accepted], after)))
    assert_close("y", got, want[-1:], path.dtype)


def test_a_line_too_narrow_for_the_drafts_is_refused(exact_path: Path) -> None:
    """vLLM #50272: lines of width - 1 columns took drafts, which ran over into the next line."""
    path, x = exact_path, tokens(exact_path, 1, 4)
    states = pool(path, 5, 1)
    told: dict[str, Any] = {"conv_state_indices": ints(path, 1), "num_accepted_tokens": ints(path, 1)}
    with pytest.raises(ValueError, match=r"^conv_state: expected at least width - 2 \+ 4 tokens = 6 columns"):
        causal_conv1d_update(x.transpose(1, 2), states, weights(path), **told)
    told["query_start_loc"] = ints(path, 0, 4)
    with pytest.raises(ValueError, match=r"^conv_state: expected at least width - 2 \+ 4 tokens = 6 columns"):
        causal_conv1d_update(x[0], states, weights(path), max_query_len=4, **told)
    with pytest.raises(ValueError, match=r"^query_start_loc: expected rows of at most 3 tokens, got 4"):
        causal_conv1d_update(x[0], states, weights(path), validate_data=True, **told)
    kept = states.clone()
    if refuses(path):
        with pytest.raises(ValueError, match=r"^query_start_loc: expected rows of at most 3 tokens, got 4"):
            causal_conv1d_update(x[0], states, weights(path), **told)
    else:
        # Nobody has looked by now: the row is skipped.
        assert (causal_conv1d_update(x[0], states, weights(path), **told) == 0).all()
    assert same_bits(states, kept)


def test_rows_with_and_without_drafts_share_a_batch(exact_path: Path) -> None:
    """vllm-xpu-kernels #510: batches of both kinds were refused or split at the wrong row."""
    path, weight, lengths = exact_path, weights(exact_path), [1, 4, 1, 3, 1]
    states = pool(path, 6, 1, 2, 3, 4, 5)
    alone, x, accepted = states.clone(), tokens(path, sum(lengths)), [1, 3, 1, 2, 4]
    starts = [sum(lengths[:i]) for i in range(6)]
    lines = ints(path, 3, 1, 5, 2, 4)
    got = causal_conv1d_update(
        x, states, weight, None, "silu", lines, ints(path, *accepted), ints(path, *starts), max_query_len=4
    )
    for i, begin in enumerate(starts[:-1]):
        row = x[begin : begin + lengths[i]].t()[None]
        want = causal_conv1d_update(row, alone, weight, None, "silu", lines[i : i + 1], ints(path, accepted[i]))
        assert torch.equal(got[begin : begin + lengths[i]], want[0].t())
    assert same_bits(states, alone)


@pytest.mark.parametrize("width", [5, 6])
def test_widths_above_four(exact_path: Path, width: int) -> None:
    """Peers load the history of such widths but multiply the first tap again and again."""
    path, weight = exact_path, weights(exact_path, width)
    states = pool(path, width - 1, 1, 2)
    want_states, x = states.cpu().clone(), tokens(path, 30)
    history = torch.tensor([True, True], device=path.device)
    got = causal_conv1d_fn(x.t(), weight, None, states, ints(path, 0, 28, 30), ints(path, 1, 2), history)
    want = field_prefill(x.t().cpu(), weight.cpu(), None, want_states, [0, 28, 30], [1, 2], [True, True], True)
    assert_close("y", got, want, path.dtype)
    assert same_bits(states.cpu(), want_states)
    lines = pool(path, width - 1, 1, 2).transpose(1, 2).contiguous()
    rows = Rows.build([28, 2], [1, 2], [1, 2], [28, 2], [0, 0], [0, 0], max_short=4, device=path.device)
    assert_close("native", path.conv(x, weight.t().contiguous(), None, lines, rows).t(), want, path.dtype)


def test_an_empty_row_in_the_middle_changes_nothing(exact_path: Path) -> None:
    """Tables made of last pieces start again at the first one behind a row that has none."""
    path, weight, x = exact_path, weights(exact_path), tokens(exact_path, 150)
    history = torch.ones(5, dtype=torch.bool, device=path.device)
    states = pool(path, HISTORY, 1, 2, 3)
    same = states.clone()
    starts, lines = ints(path, 0, 70, 70, 80, 80, 150), ints(path, 1, 4, 2, 5, 3)
    got = causal_conv1d_fn(x.t(), weight, None, states, starts, lines, history)
    want = causal_conv1d_fn(x.t(), weight, None, same, starts[[0, 1, 3, 5]], lines[[0, 2, 4]], history[:3])
    assert torch.equal(got, want) and same_bits(states, same)


@pytest.mark.parametrize("length", [1, 2, 3, 80])
def test_a_new_sequence_reads_nothing_of_its_line(exact_path: Path, length: int) -> None:
    """SGLang #24717: what the line's last owner left became history; here it is NaN, which no product with 0 hides."""
    path, x = exact_path, tokens(exact_path, length)
    states = pool(path, HISTORY)
    for told in (None, torch.tensor([False], device=path.device)):
        y = causal_conv1d_fn(
            x.t(), weights(path), None, states, ints(path, 0, length), ints(path, 4), told, activation=None
        )
        want = serial(path, torch.zeros(DIM, HISTORY), x)
        assert_close("y", y.t(), want, path.dtype)
        kept = torch.cat((torch.zeros_like(states[0]), x.t()), dim=1)[:, -HISTORY:]
        assert torch.equal(states[4], kept)
        states[4] = torch.nan


def test_products_are_not_rounded_to_16_bits(device: str) -> None:
    """vLLM, SGLang: bf16 times bf16 was rounded to bf16 before it was added up, 1 part in 256 for each tap."""
    x, weight = normal(70, DIM).bfloat16(), normal(DIM, WIDTH, seed=1).bfloat16()
    states = torch.zeros((70, HISTORY, DIM), dtype=torch.bfloat16, device=device).transpose(1, 2)
    # fp32 outputs, which show what a rounding to the states' dtype would hide.
    given, starts = x.float().to(device), torch.tensor([0, 70], dtype=torch.int32, device=device)
    got = causal_conv1d_fn(given.t(), weight.to(device), None, states, starts, activation=None)
    want = convolve(torch.zeros(DIM, HISTORY), x.t(), weight, None, False)
    assert_close("fn", got, want, torch.float32)
    states = normal(70, HISTORY, DIM, seed=2).bfloat16().transpose(1, 2)
    got = causal_conv1d_update(given, states.to(device, copy=True), weight.to(device))
    want = torch.cat([convolve(states[i], x[i, :, None], weight, None, False) for i in range(70)], dim=1)
    assert_close("update", got.t(), want, torch.float32)


@pytest.mark.parametrize("first", [2, 3, 65, 150])
def test_two_pieces_of_a_prefill_are_one(exact_path: Path, first: int) -> None:
    """A long row that reads and writes the same line: its last tokens must not be there before its first are done."""
    path, whole = exact_path, 200
    x, weight = tokens(path, whole), weights(path)
    states = pool(path, HISTORY, 1)
    split, history = states.clone(), torch.ones(1, dtype=torch.bool, device=path.device)
    lines = states.transpose(1, 2).clone()
    want = causal_conv1d_fn(x.t(), weight, None, states, ints(path, 0, whole), ints(path, 1), history)
    for part in (slice(0, first), slice(first, whole)):
        begin, end, _ = part.indices(whole)
        starts = ints(path, 0, end - begin)
        got = causal_conv1d_fn(x[part].t(), weight, None, split, starts, ints(path, 1), history)
        assert_close("y", got, want[:, part], path.dtype)
    assert same_bits(split, states)
    y = path.conv(x, weight.t().contiguous(), None, lines, plan_rows([Row(whole)], 4, path.device))
    assert_close("native", y.t(), want, path.dtype)
    assert same_bits(lines.transpose(1, 2), states)


@pytest.mark.parametrize("speculative", [True, False], ids=["speculative", "plain"])
@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("length", [5, 7, 9, 20])
def test_a_row_longer_than_promised_writes_no_other_line(
    exact_path: Path, speculative: bool, longest: int, length: int
) -> None:
    """A kernel sized for max_query_len wrote the drafts of a longer row behind its line, into the next one."""
    path, x = exact_path, tokens(exact_path, length + 1)
    columns = 6 if speculative else HISTORY
    states = pool(path, columns, 1, 4)
    before = states.clone()
    told: dict[str, Any] = {"query_start_loc": ints(path, 0, length, length + 1), "max_query_len": longest}
    if speculative:
        told["num_accepted_tokens"] = ints(path, 1, 1)
    if refuses(path):
        with pytest.raises(ValueError, match=f"^max_query_len: expected at least {length} as a row has, got {longest}"):
            causal_conv1d_update(x, states, weights(path), conv_state_indices=ints(path, 1, 4), **told)
        assert same_bits(states, before)
        return
    alone = before.clone()
    y = causal_conv1d_update(x, states, weights(path), conv_state_indices=ints(path, 1, 4), **told)
    accepted = ints(path, 1) if speculative else None
    want = causal_conv1d_update(x[length:], alone, weights(path), None, None, ints(path, 4), accepted)
    assert torch.equal(y[length:], want) and same_bits(states[4], alone[4])
    if speculative:
        assert same_bits(states[1], before[1])
    states[1], states[4] = before[1], before[4]
    assert same_bits(states, before)


def test_a_block_outside_the_table_skips_the_row(exact_path: Path) -> None:
    """A gather beyond the table's row read another row's block, or memory that is not the table's."""
    path, x = exact_path, tokens(exact_path, 4)
    states = pool(path, HISTORY, 1, 2, 3, 4)
    alone = states.clone()
    table = torch.tensor([[1, 5], [2, 6], [3, 7], [4, 0]], dtype=torch.int32, device=path.device)
    y = causal_conv1d_update(
        x,
        states,
        weights(path),
        conv_state_indices=table,
        initial_state_idx=ints(path, 0, -1, 2, 0),
        block_idx_last_scheduled_token=ints(path, 1, 1, 1, 9),
    )
    blocks: dict[str, Any] = {"initial_state_idx": ints(path, 0), "block_idx_last_scheduled_token": ints(path, 1)}
    want = causal_conv1d_update(x[:1], alone, weights(path), conv_state_indices=table[:1], **blocks)
    assert torch.equal(y[:1], want) and (y[1:] == 0).all() and same_bits(states, alone)


@pytest.mark.parametrize("null", [None, 0, 4])
def test_line_0_is_ordinary_unless_it_is_said_to_be_null(exact_path: Path, null: int | None) -> None:
    """Engines whose block 0 is null pass it as null_block_id; in others line 0 belongs to a sequence."""
    path, x = exact_path, tokens(exact_path, 2)
    lines, weight = ints(path, 0, 4), weights(path)
    history = torch.ones(2, dtype=torch.bool, device=path.device)
    for update in (True, False):
        states = pool(path, HISTORY, 0, 4)
        before = states.clone()
        if update:
            y = causal_conv1d_update(x, states, weight, conv_state_indices=lines, null_block_id=null)
        else:
            starts = ints(path, 0, 1, 2)
            y = causal_conv1d_fn(x.t(), weight, None, states, starts, lines, history, null_block_id=null).t()
        for i, line in enumerate((0, 4)):
            assert same_bits(states[line], before[line]) == (line == null)
            assert (y[i] == 0).all().item() == (line == null)


@pytest.mark.parametrize("length", [1, 2])
def test_a_negative_zero_of_the_history_stays_one(exact_path: Path, length: int) -> None:
    """The kept columns are those that were there, not sums with zero."""
    path = exact_path
    states = torch.full((2, HISTORY, DIM), -0.0, device=path.device).transpose(1, 2)
    history = torch.ones(1, dtype=torch.bool, device=path.device)
    causal_conv1d_fn(
        tokens(path, length).t(), weights(path), None, states, ints(path, 0, length), ints(path, 1), history
    )
    assert (states[1, :, : HISTORY - length] == 0).all() and states[1, :, : HISTORY - length].signbit().all()
