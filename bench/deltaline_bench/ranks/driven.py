"""An engine of a small model, of one process or of ranks, by whose batches and states both are compared."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from deltaline_bench.ranks.adapter import RANK, adapt
from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.computing import make_executor
from deltaline_server.engine.engine import Engine
from deltaline_server.engine.rank_executor import LeadingExecutor, follow
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.model import AdapterOptions, ModelOptions, load_model
from deltaline_server.ranks.ways import Ranks, Ways
from deltaline_server.snapshots.device.shared_transfer import SharedTransfer
from deltaline_server.snapshots.device.transfer import StatePlace, StateTransfer
from deltaline_server.snapshots.layout import COMMIT_FIELDS, Bytes, SpanProgress, StateLayout, state_bytes
from deltaline_server.snapshots.tiers import layer_numbers, make_layout, make_share
from deltaline_server.step import Limits
from deltaline_server.tables.pages import PagesPlaced

WAIT_S, MAX_DRAFT, LINES, PAGES = 120.0, 4, 10, 2
ADAPTERS = AdapterOptions(1, RANK)
LIMITS = Limits(
    max_sequences=LINES,
    max_draft_tokens=MAX_DRAFT,
    max_lease_ms=1000,
    inline_limit_bytes=1 << 20,
    queue_rows=64,
    queue_bytes=1 << 24,
    chunk_tokens=256,
    short_rows=4,
    long_rows=2,
)


@dataclass(frozen=True)
class Step:
    """What two rows do. joins: whether their tokens are committed at once. taken: drafts that the step commits, of a
    half. positions: behind those. pages: row and place of those that begin."""

    lengths: tuple[int, int]
    joins: bool = True
    begins: bool = False
    taken: int = 0
    half: int = 0
    positions: tuple[int, int] = (0, 0)
    pages: tuple[tuple[int, int], ...] = ()


STEPS = (
    Step((70, 40), begins=True, pages=((0, 0), (0, 1), (1, 0))),
    Step((4, 4), joins=False, positions=(70, 40)),
    Step((1, 1), taken=2, half=1, positions=(72, 42)),
)
"""A prefill, a verify, a decode that commits two drafts."""
DRAFTED = 2
"""Steps behind which drafts are still to be taken in: where a state is carried from one engine to another."""


class Driven(AbstractContextManager["Driven"]):
    """An engine that is ready, whose batches and copies are waited for."""

    def __init__(self, options: ModelOptions, width: int, engine: Engine, layout: StateLayout, has_pages: bool) -> None:
        self._width, self._engine, self._layout, self._has_pages = width, engine, layout, has_pages
        self.transfer: StateTransfer | SharedTransfer

    @classmethod
    def open(cls, options: ModelOptions, ranks: Ranks | None) -> Self | None:
        """Load and prepare; over ranks, another rank than 0 follows until rank 0 closes, and returns None."""
        model = load_model(options)
        adapt(model, options)
        pool = model.make_pool(StateOptions(LINES, MAX_DRAFT))
        layout, executor = make_layout(model, pool), make_executor(model, pool, LIMITS)
        transfer: StateTransfer | SharedTransfer
        if ranks is None:
            transfer = StateTransfer(layout, layer_numbers(model), pool)
        else:
            ways = Ways.open(ranks)
            share = make_share(model, pool, ways.states)
            if ranks.rank:
                follow(executor, ways, share.follow, lambda: None)
                return None
            executor = leading = LeadingExecutor(executor, ways)
            transfer = SharedTransfer(layout, share, ways.states, leading.tell_transfer)
        engine = Engine(executor, model.device)
        engine.start()
        engine.prepare(lambda done, total: None).result(WAIT_S)
        driven = cls(options, model.ends[0].input_width, engine, layout, pool.page_table is not None)
        driven.transfer = transfer
        return driven

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def play(
        self, lines: tuple[int, int], seed: int, steps: Sequence[Step] = STEPS, *, is_adapted: bool = False
    ) -> list[NDArray[Any]]:
        """Compute steps of rows on two lines, the first with the adapter if asked for, the second drawn from a seed."""
        return [self._compute(step, lines, seed, is_adapted) for step in steps]

    def save(self, line: int, row: int) -> Bytes:
        """Return the bytes of a row's state on a line, behind the DRAFTED steps."""
        spans = _progress(row)
        memory = np.full(state_bytes(self._layout.sections(spans)), 0xA5, dtype=np.uint8)
        nothing = np.zeros((0, COMMIT_FIELDS), dtype=np.int64)
        self._copy(partial(self.transfer.gather, spans, self._place(line), nothing, memory))
        return memory

    def restore(self, line: int, row: int, stored: Bytes) -> None:
        """Put a row's state on a line."""
        place = self._place(line)
        if self._has_pages:
            self._engine.place_pages(PagesPlaced(np.array([line]), place.pages[None], np.zeros((2, 0), dtype=np.int64)))
        self._copy(partial(self.transfer.scatter, _progress(row), place, stored))

    def _copy(self, work: partial[None]) -> None:
        self._engine.transfer(work).result(WAIT_S)

    def _place(self, line: int) -> StatePlace:
        pages = PAGES * line + np.arange(PAGES if self._has_pages else 0, dtype=np.int32)
        return StatePlace((line,), pages)

    def _compute(self, step: Step, lines: tuple[int, int], seed: int, is_adapted: bool) -> NDArray[Any]:
        control = np.zeros((7, 3), dtype=np.int32)
        control[0, 1:] = np.cumsum(step.lengths)
        for row, (line, length, position) in enumerate(zip(lines, step.lengths, step.positions, strict=True)):
            committed = length if step.joins else 0
            read = 0 if step.begins else line
            control[1:, row] = read, line, committed, step.taken, step.half, position - step.taken
        # Of each row's own: its numbers don't depend on what is computed before.
        sources = [np.random.default_rng((row_seed, step.positions[0])) for row_seed in (1, seed)]
        hidden = tuple(
            source.standard_normal((n, self._width)).astype(np.float32)
            for source, n in zip(sources, step.lengths, strict=True)
        )
        begun = [[lines[row], at, PAGES * lines[row] + at] for row, at in step.pages]
        batch = StepBatch(
            0,
            control,
            0 if step.lengths[0] > MAX_DRAFT else 2,
            hidden,
            None,
            adapter_places=np.array([0, -1], dtype=np.int32) if is_adapted else None,
            new_pages=np.array(begun, dtype=np.int32).reshape(-1, 3).T.copy() if self._has_pages else None,
        )
        done: queue.SimpleQueue[BatchResult] = queue.SimpleQueue()
        self._engine.submit(batch, done.put)
        result = done.get(timeout=WAIT_S)
        if result.failed or not result.finite.all():
            raise RuntimeError("a batch: expected finite outputs, got others or none")
        return result.hidden


def _progress(row: int) -> list[SpanProgress]:
    step = STEPS[DRAFTED]
    return [
        SpanProgress.captured(
            step=DRAFTED,
            position=step.positions[row],
            replay=step.taken,
            zero_commits=0,
            draft_half=step.half,
            num_commits=0,
        )
    ]
