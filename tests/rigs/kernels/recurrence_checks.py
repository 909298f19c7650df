"""What must hold of every recurrence: between a batch and its reference, and between runs of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import torch
from rigs.kernels.batches import Recurrent, Row, plan_rows
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.rows import StateLines

AnyBatch = TypeVar("AnyBatch", bound=Recurrent)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Return whether NaNs are at the same places and the rest is equal."""
    return torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def check_against_reference(batch: Recurrent, path: Path, dtype: torch.dtype) -> None:
    """Compare outputs, states and drafts, lines that no row may touch included."""
    reference = batch.clone()
    want = reference.run_reference()
    got = batch.run(path)
    assert got.dtype == path.dtype
    assert_close("o", got, want, path.dtype if dtype == torch.bfloat16 else dtype)
    assert_close("state", batch.state, reference.state, dtype)
    assert_close("drafts", batch.drafts, reference.drafts, path.dtype)


def check_pieces(whole: Recurrent, path: Path, ends: Sequence[int]) -> None:
    """Compare a batch of one row with the same tokens in several calls."""
    split = whole.clone()
    got = torch.cat([split.run_part(path, *piece) for piece in pairwise(ends)])
    assert_close("o", got, whole.run(path), path.dtype)
    assert_close("state", split.state, whole.state, path.dtype)


def check_any_accepted_count(batch: Recurrent, path: Path) -> None:
    """Of a VERIFY of four tokens: what follows it begins behind those that were accepted, and it changes no state."""
    for accepted in range(5):
        drafted, serial = batch.clone(), batch.clone()
        before = drafted.state.clone()
        drafted.run(path)
        assert same_bits(drafted.state, before)
        for t in range(accepted):
            serial.run_part(path, t, t + 1)
        got = drafted.run_part(path, 3, 4, Row(1, replayed=accepted, half=0))
        want = serial.run_part(path, 3, 4)
        assert_close(f"o, accepted {accepted}", got, want, torch.float32)
        assert_close(f"state, accepted {accepted}", drafted.state, serial.state, torch.float32)


def check_replay_alone(batch: Recurrent, path: Path) -> None:
    """A replay leaves what committing leaves, of a VERIFY of five tokens behind two of half 1.

    To the bit where both go token by token, strong gates that scale the tile in between included.
    """
    for accepted in (1, 5):
        drafted, committed = batch.clone(), batch.clone()
        drafted.run(path)
        drafted.run_part(path, 0, 0, Row(0, replayed=accepted))
        committed.run_part(path, 0, 0, Row(0, replayed=2, half=1))
        committed.run_part(path, 0, accepted)
        check_committed(drafted.state, committed.state, path)


def check_replay_beside_tokens(drafted: Recurrent, path: Path) -> None:
    """The same where rows of several tokens go at once, of a VERIFY of eight tokens behind three of half 1.

    To the bit where both go through the same kernel, which a row of one token alone does not.
    """
    accepted, committed = 4, drafted.clone()
    drafted.run(path)
    drafted.run_part(path, 4, 8, Row(2, verify=True, replayed=accepted), Row(2, replayed=0))
    committed.run_part(path, 0, accepted, Row(accepted, replayed=3, half=1))
    check_committed(drafted.state[1], committed.state[1], path)


def check_committed(got: Tensor, want: Tensor, path: Path) -> None:
    if path.serial:
        assert same_bits(got, want)
    assert_close("state", got, want, torch.float32)


def check_rows_are_apart(make: Callable[[], AnyBatch], rows: Sequence[Row], path: Path) -> None:
    """Compare each row among NaNs with the same row beside the others, to the bit; and a repeat with the run before."""
    whole, again = make(), make()
    want = whole.run(path)
    assert torch.equal(again.run(path), want) and same_bits(again.state, whole.state)
    start = 0
    for i, row in enumerate(rows):
        alone = make()
        kept = [other if i == j else Row(other.length, skipped=True) for j, other in enumerate(rows)]
        alone = alone.replaced(rows=plan_rows(kept, alone.rows.max_short, path.device))
        others = torch.ones(len(want), dtype=torch.bool, device=path.device)
        others[start : start + row.length] = False
        for name in alone.PACKED:
            getattr(alone, name)[others] = torch.nan
        got = alone.run(path)
        assert torch.equal(got[~others], want[~others]) and not got[others].any()
        line = 2 * i + 1
        assert same_bits(alone.state[line], whole.state[line]) and same_bits(alone.drafts[line], whole.drafts[line])
        start += row.length


def check_a_draft_that_is_not_finite(make: Callable[[], AnyBatch], path: Path, what: str, at: int) -> None:
    """It leaves the drafts before it, their records and the state alone."""
    good, bad = make(), make()
    getattr(bad, what)[at] = torch.nan
    want, got = good.run(path), bad.run(path)
    assert torch.equal(got[:at], want[:at]) and got[at:].isnan().any()
    assert torch.equal(bad.state[1], good.state[1])
    assert torch.equal(bad.drafts[1, 1, :at], good.drafts[1, 1, :at])


def check_inputs_are_left_alone(batch: Recurrent, weights: Sequence[Tensor], path: Path) -> None:
    """Tokens and weights keep their values."""
    inputs = [*(getattr(batch, name) for name in batch.PACKED), *weights]
    before = [x.clone() for x in inputs]
    batch.run(path)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def check_shifted_lines(whole: Recurrent, path: Path) -> None:
    """Engines have no zero line: the pools that they pass begin with what `Rows` calls line 1."""
    shifted = whole.clone()
    want = whole.run(path)
    got = torch.full_like(want, torch.nan)
    shifted.launch(StateLines(shifted.state[1:], shifted.drafts[1:], shift=1), shifted.rows, got)
    assert torch.equal(got, want)
    assert same_bits(shifted.state, whole.state) and same_bits(shifted.drafts, whole.drafts)


def place_lines(batch: AnyBatch, gap: int) -> tuple[AnyBatch, list[Tensor]]:
    """Return the batch with states and drafts in one room of bytes, line by line beside each other, `gap` bytes behind.

    And the bytes behind the states and the drafts of each line, which are 255.
    """
    tensors, parts, between = (batch.state, batch.drafts), [], []
    sizes = [x[0].numel() * x.element_size() for x in tensors]
    # Drafts begin at whole values, and so do the lines of all.
    padding = [-size % 4 + gap + -gap % 4 for size in sizes]
    width = sum(sizes) + sum(padding)
    room = torch.full((len(batch.state), width), 255, dtype=torch.uint8, device=batch.state.device)
    begin = 0
    for x, size, behind in zip(tensors, sizes, padding, strict=True):
        part = room[:, begin : begin + size].view(x.dtype).unflatten(1, x.shape[1:])
        part.copy_(x)
        parts.append(part)
        between.append(room[:, begin + size : begin + size + behind])
        begin += size + behind
    return batch.replaced(state=parts[0], drafts=parts[1]), between


def check_written_elsewhere(batch: Recurrent) -> None:
    """Compare what rows write to other states, of 16 bits, with what they write in place; the others are read only."""
    before, written = batch.clone(), torch.full_like(batch.state, torch.nan, dtype=torch.float16)
    tokens = getattr(batch, batch.PACKED[0])
    size = (len(tokens), *batch.state.shape[1:-1])
    o, want = (torch.full(size, torch.nan, dtype=tokens.dtype, device=tokens.device) for _ in range(2))
    batch.launch(StateLines(batch.state, batch.drafts, written=written), batch.rows, o)
    assert same_bits(batch.state, before.state)
    before.launch(StateLines(before.state, before.drafts), before.rows, want)
    assert_close("o", o, want, tokens.dtype)
    lines = [line for line in batch.rows.write_line.tolist() if line > 0]
    assert_close("states", written[lines], before.state[lines], written.dtype)
    assert int((~written.isnan()).flatten(1).all(1).sum()) == len(lines)


def check_far_lines(batch: Recurrent, path: Path, before_each: Callable[[int], None]) -> None:
    """Compare lines beyond 2^31 values of the state, counted from 0 as engines do, with the same ones near it.

    Twice, of whole rows and of parts of 64 tokens, as `before_each` arranges.
    """
    near = batch.clone()
    outputs = near.run(path)
    far = 2**31 // batch.state[0].numel() + 7
    ours = slice(far - 1, far - 1 + batch.state.shape[0])
    pool = torch.zeros(ours.stop, *batch.state.shape[1:], dtype=batch.state.dtype, device=path.device)
    drafts = torch.zeros(ours.stop, *batch.drafts.shape[1:], device=path.device)
    drafts[ours] = batch.drafts
    control = batch.rows.control.clone()
    control[1:3] = torch.where(control[1:3] > 0, control[1:3] + far, control[1:3])
    placed = replace(batch.rows, control=control)
    for length in (0, 64):
        before_each(length)
        pool[ours] = batch.state
        o = torch.full_like(outputs, torch.nan)
        batch.launch(StateLines(pool, drafts, shift=1), placed, o)
        assert_close("o", o, outputs, path.dtype)
        assert_close("state", pool[ours], near.state, batch.state.dtype)
