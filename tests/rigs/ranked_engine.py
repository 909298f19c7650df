"""An engine of a small model, of one process or over ranks, and batches of all kinds with changes between them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rigs.ranked_layers import adapt

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.engine.engine import Engine
from deltaline_server.engine.executor import CpuExecutor, Executor
from deltaline_server.engine.rank_executor import LeadingExecutor, follow
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.models.model import AdapterOptions, Model, ModelOptions, load_model
from deltaline_server.ranks.ways import Ranks, Ways
from deltaline_server.tables.pages import PagesPlaced

MAX_DRAFT, PAGE_SIZE, NUM_LINES = 4, 64, 6
WAIT_S = 100.0
SPANS = (range(0, 1), range(1, 2))


class RankedEngine:
    """An engine whose batches are waited for; every span gets the same ones."""

    def __init__(self, engine: Engine, widths: Sequence[int]) -> None:
        self.engine, self.widths = engine, widths
        self._source = np.random.default_rng(0)

    def run(
        self,
        rows: Sequence[tuple[int, int, int, int, int, int, int]],
        new_pages: NDArray[np.int32],
        waypoints: NDArray[np.int32] | None = None,
        adapter_places: NDArray[np.int32] | None = None,
    ) -> list[NDArray[Any]]:
        """Compute rows on both spans, each of a length and its fields of the control; pages only on span 1, which has
        them."""
        control = np.zeros((7, len(rows) + 1), dtype=np.int32)
        lengths = [length for length, *_ in rows]
        control[0, 1:] = np.cumsum(lengths)
        for row, (_, *fields) in enumerate(rows):
            control[1:, row] = fields
        num_short = next((i for i, n in enumerate(lengths) if n > MAX_DRAFT), len(rows))
        made = []
        for span, width in enumerate(self.widths):
            hidden = self._source.standard_normal((int(control[0, -1]), width)).astype(np.float32)
            pieces = tuple(np.split(hidden, [1]))
            batch = StepBatch(
                span,
                control,
                num_short,
                pieces,
                wanted=None,
                adapter_places=adapter_places,
                new_pages=new_pages if span else None,
                waypoints=waypoints,
            )
            done: queue.SimpleQueue[BatchResult] = queue.SimpleQueue()
            self.engine.submit(batch, done.put)
            result = done.get(timeout=WAIT_S)
            assert not result.failed and result.finite.all()
            made.append(result.hidden)
        return made


def open_engine(model: Model, executor: Executor) -> RankedEngine:
    """An engine that is ready."""
    opened = RankedEngine(Engine(executor, model.device), [end.input_width for end in model.ends])
    opened.engine.start()
    opened.engine.prepare(lambda done, total: None).result(WAIT_S)
    return opened


def no_copy(told: object) -> None:
    """What a rank does of a transfer where none is told of."""
    raise AssertionError("no state is copied")


def no_loss() -> None:
    """What a rank does when rank 0 is gone; its own thread learns of it as well."""


def drive(ranks: Ranks | None, config: Path) -> list[NDArray[Any]]:
    """Compute batches and change state between them; the outputs, which rank 0 has, or the one process."""
    model, _, executor = load(ranks, config)
    if ranks is not None:
        ways = Ways.open(ranks)
        if ranks.rank > 0:
            follow(executor, ways, no_copy, no_loss)
            return []
        executor = LeadingExecutor(executor, ways)
    opened = open_engine(model, executor)
    made = opened.run(
        # Length; read, write, committed, replayed, half, position. Line 3 gets what line 1 is behind 64 tokens.
        [(3, 0, 2, 3, 0, 0, 0), (70, 0, 1, 70, 0, 0, 0)],
        new_pages=np.array([[2, 1, 1], [0, 0, 1], [3, 1, 2]], dtype=np.int32),
        waypoints=np.array([[1], [64], [3]], dtype=np.int32),
        adapter_places=np.array([-1, 0], dtype=np.int32),
    )
    # Its page is a copy of line 1's.
    opened.engine.place_pages(PagesPlaced(np.array([3]), np.array([[5]], dtype=np.int32), np.array([[1], [5]])))
    made += opened.run(
        [(4, 1, 1, 0, 0, 0, 70), (1, 2, 2, 1, 0, 0, 3), (1, 3, 3, 1, 0, 0, 64)],
        new_pages=np.array([[3], [1], [6]], dtype=np.int32),
    )
    opened.engine.zero_lines(np.array([2]))
    made += opened.run(
        [(1, 1, 1, 1, 2, 1, 72), (1, 2, 2, 1, 0, 0, 0)], new_pages=np.array([[2], [0], [4]], dtype=np.int32)
    )
    opened.engine.close()
    return made


def idle(ranks: Ranks, config: Path, seconds: float) -> float:
    """Ask nothing for so long, then end; the processor's seconds that another rank than 0 takes for that."""
    _, _, executor = load(ranks, config)
    ways = Ways.open(ranks)
    if ranks.rank == 0:
        leading = LeadingExecutor(executor, ways)
        time.sleep(seconds)
        leading.close()
        return 0.0
    begin_s = time.process_time()
    follow(executor, ways, no_copy, no_loss)
    return time.process_time() - begin_s


def leave(ranks: Ranks, config: Path) -> list[bool]:
    """Let the other rank go while nothing is asked: whether the engine comes to know it, whether a batch fails, and
    whether that a rank is lost was told."""
    model, _, executor = load(ranks, config)
    ways = Ways.open(ranks)
    if ranks.rank > 0:
        return []
    lost = threading.Event()
    engine = Engine(LeadingExecutor(executor, ways, lost.set), model.device)
    engine.start()
    end_s = time.monotonic() + WAIT_S
    while not engine.failed() and time.monotonic() < end_s:
        time.sleep(0.01)
    is_known = engine.failed()
    control = np.array([[0, 1], [0, 0], [-1, 0], [1, 0], [0, 0], [0, 0], [0, 0]], dtype=np.int32)
    batch = StepBatch(0, control, 1, (np.ones((1, model.hidden_size), dtype=np.float32),), None)
    done: queue.SimpleQueue[BatchResult] = queue.SimpleQueue()
    engine.submit(batch, done.put)
    has_failed = done.get(timeout=WAIT_S).failed
    engine.close()
    return [is_known, has_failed, lost.wait(WAIT_S)]


def load(ranks: Ranks | None, config: Path) -> tuple[Model, StatePool, Executor]:
    """A model with an adapter, its state, and what computes it, of this rank."""
    options = ModelOptions(torch.device("cpu"), random_init=config, spans=SPANS, adapters=AdapterOptions(1, 8))
    if ranks is not None:
        options = replace(options, rank=ranks.rank, world_size=ranks.world_size, ranks=ranks)
    model = load_model(options)
    adapt(model, options)
    pool = model.make_pool(StateOptions(NUM_LINES, MAX_DRAFT, page_size=PAGE_SIZE))
    return model, pool, CpuExecutor(model, pool)
