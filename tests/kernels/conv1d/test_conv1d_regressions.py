"""Mistakes that convolutions of inference engines were found to make, one test for each, named after its report.

Numbers are those of reports to the engines' own trackers. Whatever must not be read is NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.kernels.draws import normal
from rigs.kernels.field_conv1d import convolve
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import Rows, causal_conv1d
from deltaline_kernels.compat import causal_conv1d_fn, causal_conv1d_update

DIM = 40
WIDTH = 4
HISTORY = WIDTH - 1
MANY = 2**31


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


def refuses(path: Path) -> bool:
    """Whether lengths are looked at without being asked to: by the CPU path, never by the kernels."""
    return path.device == "cpu" and type(path) is Path


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


@pytest.mark.parametrize("told", [-7, 0, 90])
def test_an_accepted_count_outside_the_line_reads_no_other_line(exact_path: Path, told: int) -> None:
    """vLLM #50021: accepted - 1 was taken for a column whatever it was: the line before was read, or the one behind."""
    path, x = exact_path, tokens(exact_path, 2, 3).transpose(1, 2)
    states, nearest = pool(path, 5, 2, 3), min(max(told, 1), 3)
    same = states.clone()
    got = causal_conv1d_update(x, states, weights(path), None, None, ints(path, 2, 3), ints(path, told, told))
    want = causal_conv1d_update(x, same, weights(path), None, None, ints(path, 2, 3), ints(path, nearest, nearest))
    assert got.isfinite().all() and torch.equal(got, want) and same_bits(states, same)


def test_a_line_too_narrow_for_the_drafts_is_refused(exact_path: Path) -> None:
    """vLLM #50272: lines of width - 1 columns took drafts, which ran over into the next line."""
    path, x = exact_path, tokens(exact_path, 1, 4)
    states = pool(path, 5, 1)
    told: dict[str, Any] = {"conv_state_indices": ints(path, 1), "num_accepted_tokens": ints(path, 1)}
    told["query_start_loc"] = ints(path, 0, 4)
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


@pytest.mark.parametrize("speculative", [True, False], ids=["speculative", "plain"])
@pytest.mark.parametrize(("longest", "length"), [(1, 5), (3, 4), (4, 7), (4, 20)])
def test_a_row_longer_than_promised_writes_no_other_line(
    exact_path: Path, speculative: bool, longest: int, length: int
) -> None:
    """A kernel sized for max_query_len wrote the drafts of a longer row behind its line, into the next one."""
    path, x = exact_path, tokens(exact_path, length + 1)
    columns = longest + 2 if speculative else HISTORY
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
