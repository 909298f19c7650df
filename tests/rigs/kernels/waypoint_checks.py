"""What must hold of waypoints: they are what the tokens before them leave, and all else is as it is without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from rigs.kernels.batches import Batch, Recurrent, Row, plan_rows
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_kernels.rows import WAYPOINT_TOKENS

AnyBatch = TypeVar("AnyBatch", bound=Recurrent)
# Run a batch; return what it returns and the lines that it writes.
Run = Callable[[AnyBatch], tuple[Tensor, Tensor]]

# In front a short row; behind it rows that begin anywhere in a chunk.
ROWS = [
    Row(1),
    Row(200, replayed=2, half=1),
    Row(0),
    Row(65, skipped=True),
    Row(64, fresh=True),
    Row(129, to="other"),
    Row(150, to="nowhere"),
]
# Rows and places: at a row's very end too, where all are chunks and where there is a rest.
PLACES = [(1, 64), (1, 192), (4, 64), (5, 64), (5, 128), (6, 128)]


def leave_states(path: Path, batch: Recurrent) -> tuple[Tensor, Tensor]:
    """Run a recurrence."""
    return batch.run(path), batch.state


def leave_inputs(path: Path, batch: Batch) -> tuple[Tensor, Tensor]:
    """Run a convolution."""
    return path.conv(batch.qkv, batch.weight, batch.bias, batch.lines, batch.rows), batch.lines


def add_lines(batch: AnyBatch, count: int) -> AnyBatch:
    """Return the batch with `count` more lines of NaN behind its own, in all that has lines."""
    names = ["state", "drafts"] + (["lines"] if isinstance(batch, Batch) else [])
    found = {name: getattr(batch, name) for name in names}
    more = {name: torch.full_like(x[:1], torch.nan).expand(count, *x.shape[1:]) for name, x in found.items()}
    return batch.replaced(**{name: torch.cat((x, more[name])) for name, x in found.items()})


def place(
    batch: AnyBatch, rows: Sequence[Row], places: Sequence[tuple[int, int]], device: str
) -> tuple[AnyBatch, list[int]]:
    """Return the batch with waypoints at `places`, rows and how many of their tokens, and their lines.

    All entries that say nothing name a line that is no row's: whoever followed them would change it.
    """
    first, wider = len(batch.state), add_lines(batch, len(places))
    lines = list(range(first, first + len(places)))
    told = [(i, done, line) for (i, done), line in zip(places, lines, strict=True)]
    plan = plan_rows(rows, batch.rows.max_short, device, told)
    assert plan.waypoints is not None
    says_nothing = torch.ones(len(plan.waypoints), dtype=torch.bool)
    for i, (row, begin) in enumerate(zip(rows, plan.query_start_loc.tolist(), strict=False)):
        at = begin // WAYPOINT_TOKENS + i
        if not row.skipped:
            says_nothing[at : at + row.length // WAYPOINT_TOKENS] = False
    untold = says_nothing.to(device) & (plan.waypoints < 1)
    return wider.replaced(rows=replace(plan, waypoints=plan.waypoints.masked_fill(untold, first - 1))), lines


def cut(batch: AnyBatch, rows: Sequence[Row], i: int, done: int, device: str) -> tuple[AnyBatch, int]:
    """Return the batch, in the same bucket, with the first `done` tokens of row i alone, and the line they go to."""
    row = rows[i]
    last = replace(row, length=done, to="same" if row.to == "same" else "other")
    others = [Row(other.length if j < i else 0, skipped=True) for j, other in enumerate(rows)]
    plan = plan_rows([*others[:i], last, *others[i + 1 :]], batch.rows.max_short, device)
    return batch.clone().replaced(rows=plan), 2 * i + (1 if last.to == "same" else 2)


def check_waypoints(
    make: Callable[[], AnyBatch],
    path: Path,
    run: Run[AnyBatch],
    rows: Sequence[Row] = ROWS,
    places: Sequence[tuple[int, int]] = PLACES,
) -> None:
    """Compare waypoints with the tokens before each of them alone, and all else with a run without them, to the bit.

    A waypoint of a skipped row leaves its line as it is.
    """
    plain, (placed, lines) = make(), place(make(), rows, [*places, *_skipped(rows)], path.device)
    want_outputs, want = run(plain)
    drafts = placed.drafts.clone()
    outputs, found = run(placed)
    assert torch.equal(outputs, want_outputs)
    assert same_bits(found[: len(want)], want) and same_bits(placed.drafts[: len(want)], plain.drafts)
    assert same_bits(placed.drafts[len(want) :], drafts[len(want) :])
    for (i, done), line in zip(places, lines, strict=False):
        alone, written = cut(make(), rows, i, done, path.device)
        _, left = run(alone)
        # What of a line is written, no more: the rest is NaN, as it was.
        is_written = ~found[line].isnan()
        assert is_written.any() and torch.equal(found[line][is_written], left[written][is_written])
    for line in lines[len(places) :]:
        assert found[line].isnan().all()


def check_going_on(make: Callable[[Sequence[Row]], AnyBatch], path: Path, run: Run[AnyBatch]) -> None:
    """Compare what follows a waypoint with the same tokens in a row that reads it, of the same chunks, to the bit."""
    rows = [Row(200, replayed=2, half=1)]
    batch, (line,) = place(make(rows), rows, [(0, 128)], path.device)
    outputs, left = (x.clone() for x in run(batch))
    fields = ([128, 72], [-1, line], [-1, 2], [128, 72], [0, 0], [0, 0])
    plan = Rows.build(*fields, max_short=batch.rows.max_short, device=path.device)
    again, found = run(batch.replaced(rows=plan))
    assert torch.equal(again[128:], outputs[128:]) and not again[:128].any()
    is_written = ~found[2].isnan()
    assert is_written.any() and torch.equal(found[2][is_written], left[1][is_written])


def check_waypoints_against_reference(
    batch: AnyBatch,
    path: Path,
    rows: Sequence[Row] = ROWS,
    places: Sequence[tuple[int, int]] = PLACES,
    dtype: torch.dtype | None = None,
) -> None:
    """Compare outputs, and states of all lines, within the tolerance of a dtype."""
    placed, lines = place(batch, rows, places, path.device)
    reference = placed.clone()
    want, got = reference.run_reference(), placed.run(path)
    assert_close("o", got, want, path.dtype)
    assert_close("state", placed.state, reference.state, dtype or path.dtype)
    assert not placed.state[lines].isnan().any()


def _skipped(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return [(i, 64) for i, row in enumerate(rows) if row.skipped and row.length >= 64]
