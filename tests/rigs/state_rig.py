"""A served model whose engine computes when it is told, in memory that is poisoned wherever nobody has written yet.

Every batch is computed once more for each of its rows on a reference: a sequence of its own on another pool, which
shares nothing, was fed the same tokens in the same places of the same batches, and must give the same bits.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rigs.limits import make_limits
from rigs.scheduler_rig import Counts

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.computing import make_executor
from deltaline_server.engine.executor import Executor
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.state_pool import LayerState, StateOptions, StatePool
from deltaline_server.models.model import ModelOptions, load_model
from deltaline_server.runtime import page_pool
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.snapshots.directory import StateDirectory
from deltaline_server.snapshots.files import FileTier
from deltaline_server.snapshots.host import HostTier
from deltaline_server.snapshots.sequences.in_order import InOrder
from deltaline_server.snapshots.sequences.passage import Passage
from deltaline_server.snapshots.states import States
from deltaline_server.snapshots.tiers import Tiers, layer_numbers, make_layout
from deltaline_server.tables.captured.capture import Capture
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.captured.waypoints import WaypointTable
from deltaline_server.tables.kept_replies import KeptReplies
from deltaline_server.tables.ledger import StepLedger
from deltaline_server.tables.lines import LinePool
from deltaline_server.tables.pages import PagePool, PagesPlaced
from deltaline_server.tables.sequence_adapters import SequenceAdapters
from deltaline_server.tables.sequences import SequenceTable

MAX_DRAFT, PAGE_SIZE, MAX_CONTEXT = 4, 16, 160
CPU = torch.device("cpu")
STORED_LIMIT = 100
FINGERPRINT, FILE_BYTES = bytes(range(32)), 1 << 22
Array = NDArray[Any]


@dataclass(frozen=True)
class Entry:
    """What a sequence did in a batch: its row there, how far it was, and the outputs.

    step: 0 where it is inherited. stop: tokens of the row at a waypoint where the sequence stopped, 0 for its end.
    """

    batch: StepBatch
    row: int
    step: int
    committed: int
    replayed: int
    position: int
    output: Array
    stop: int = 0


class Reference:
    """A sequence on a line of its own, which nobody else ever reads."""

    def __init__(self, executor: Executor, pool: StatePool, line: int, spans: Sequence[Sequence[int]]) -> None:
        """spans: the places of each one's states in the pool."""
        self._executor, self._pool, self._line, self._layers = executor, pool, line, spans
        self._has_begun, self._half = [False] * len(spans), [0] * len(spans)
        if pool.page_table is not None:
            width = pool.page_table.shape[1]
            pool.page_table[line] = torch.arange(1, width + 1) + (line - 1) * width

    def run(self, batch: StepBatch, row: int, committed: int, replayed: int, position: int, stop: int = 0) -> Array:
        """The outputs of a batch's row, beside which the others are padding. It goes on behind `stop` tokens of it."""
        span, control = batch.span, batch.control.copy()
        control[1:3, :-1], control[3:7, :-1] = -1, 0
        read = self._line if self._has_begun[span] else 0
        control[1:, row] = read, self._line, committed, replayed, self._half[span], position
        self._has_begun[span] = True
        self._half[span] ^= not committed
        new_pages = None if batch.new_pages is None else batch.new_pages[:, :0]
        beside = self._pool.num_lines
        waypoints = np.array([[row], [stop], [beside]], dtype=np.int32) if stop else None
        alone = replace(batch, control=control, wanted=None, into=(), new_pages=new_pages, waypoints=waypoints)
        with torch.inference_mode():
            output = self._executor.launch(alone).result().hidden
            for layer in self._layers[span] if stop else ():
                state = self._pool.layers[layer]
                for tensor in state.tensors if isinstance(state, LayerState) else ():
                    tensor[self._line] = tensor[beside]
        if stop and self._pool.device.type == "cuda":
            torch.cuda.synchronize()
        made: Array = output[control[0, row] : control[0, row + 1]]
        return made.copy()


class InlineEngine:
    """Computes batches and changes of the state one after the other: at once (`eager`), or by `run`."""

    def __init__(
        self, executor: Executor, pool: StatePool, on_batch: Callable[[StepBatch], Callable[[Array], None]]
    ) -> None:
        """on_batch: told of a batch that is submitted; what it returns is told of the outputs, before anybody else."""
        self._pool, self._executor, self._on_batch = pool, executor, on_batch
        self.eager = True
        self._tasks: deque[Callable[[], None]] = deque()

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
        told = self._on_batch(batch)

        def compute() -> None:
            with torch.inference_mode():
                result = self._executor.launch(batch).result()
            told(result.hidden)
            on_done(result)

        self._do(compute)

    def poll(self) -> bool:
        return False

    @property
    def num_tasks(self) -> int:
        """How many wait for `run`."""
        return len(self._tasks)

    def run(self) -> None:
        while self._tasks:
            self._tasks.popleft()()

    def zero_lines(self, lines: NDArray[np.int64]) -> None:
        lines = lines.copy()
        self._do(lambda: self._executor.zero(lines))

    def place_pages(self, placed: PagesPlaced) -> None:
        self._do(lambda: self._executor.place_pages(placed))

    def transfer(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()

        def begin() -> None:
            with torch.inference_mode():
                self._executor.transfer(work).result()
            done.set_result(None)

        self._do(begin)
        return done

    def poison_lines(self, lines: Sequence[int]) -> None:
        """Let lines hold what nobody may read, and their rows of the table name a page that is not theirs."""

        def poison() -> None:
            for state in self._pool.layers:
                for tensor in state.tensors if isinstance(state, LayerState) else ():
                    tensor[lines] = torch.nan
            if self._pool.page_table is not None:
                self._pool.page_table[lines] = 1
            self._finish()

        self._do(poison)

    def poison_pages(self, pages: Sequence[int]) -> None:
        def poison() -> None:
            for state in self._pool.layers:
                if isinstance(state, KvState):
                    state.k_pages[pages] = state.v_pages[pages] = torch.nan
            self._finish()

        self._do(poison)

    def _finish(self) -> None:
        """What was written is seen by whatever the executor launches, on whichever stream."""
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize()

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        if self.eager and len(self._tasks) == 1:
            task()
            self._tasks.popleft()


class PoisonedLines(LinePool):
    """Lines that hold poison while they are free."""

    engine: InlineEngine

    def release(self, lines: Iterable[int]) -> None:
        lines = list(lines)
        before = self.references() > 0
        super().release(lines)
        freed = np.flatnonzero(before & (self.references() == 0)).tolist()
        if freed:
            self.engine.poison_lines(freed)


class PoisonedPages(PagePool):
    """Pages that hold poison while they are free."""

    engine: InlineEngine

    def drop(self, pages: NDArray[np.int32]) -> None:
        before = self.references() > 0
        super().drop(pages)
        freed = np.flatnonzero(before & (self.references() == 0)).tolist()
        if freed:
            self.engine.poison_pages(freed)


class StateRig:
    """Table, scheduler and states of a small model of random weights; a clock that is moved by hand.

    on_rows: told of each batch's rows when it is submitted: the batch, and the handles of its rows by their places;
    what it returns is told of the outputs.
    """

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path,
        on_rows: Callable[[StepBatch, dict[int, int]], Callable[[Array], None]],
        *,
        slots: int,
        snapshot_lines: int,
        pages: int,
        spans: Sequence[range] | None = None,
        references: int,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
        chunk_tokens: int = 64,
        host_bytes: int = 0,
        state_dir: Path | None = None,
    ) -> None:
        """host_bytes: of host memory for states, 0 for none; state_dir: beside it, for files of some megabytes."""
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        self.now, self._on_rows = 100.0, on_rows
        options = ModelOptions(device, random_init=path, dtype=dtype, spans=spans, max_context=MAX_CONTEXT)
        self.model = load_model(options)
        spare_lines = int(host_bytes > 0)
        lines = slots + snapshot_lines + spare_lines
        kinds: dict[str, Any] = {"max_draft": MAX_DRAFT, "state_dtype": state_dtype, "page_size": PAGE_SIZE}
        self.pool = self.model.make_pool(StateOptions(slots, snapshot_lines=snapshot_lines + spare_lines, **kinds))
        # The last line is where references stop on their way.
        self._reference_pool = self.model.make_pool(StateOptions(references + 1, **kinds))
        self._reference_lines = list(range(references, 0, -1))
        limits = make_limits(max_draft_tokens=MAX_DRAFT, chunk_tokens=chunk_tokens)
        executor, self._reference_executor = (
            make_executor(self.model, pool, limits) for pool in (self.pool, self._reference_pool)
        )
        with torch.inference_mode():
            for made_executor in (executor, self._reference_executor):
                made_executor.prepare(lambda done, total: None)
        self.engine = InlineEngine(executor, self.pool, self._batch)
        self.pages = None
        made = page_pool(self.model, self.pool)
        if made is not None:
            self.pages = PoisonedPages(
                num_pages=pages,
                page_size=PAGE_SIZE,
                max_context=min(MAX_CONTEXT, pages * PAGE_SIZE),
                num_lines=lines,
                spans=made.spans,
            )
            self.pages.engine = self.engine
            self.engine.poison_pages(range(pages + 1))
        self.lines = PoisonedLines(lines, self.engine.zero_lines, self.pages, snapshot_lines, spare_lines)
        self.lines.engine = self.engine
        self.engine.poison_lines(range(1, lines + 1))
        num_spans = len(self.model.spans)
        self.table = SequenceTable(
            lines=self.lines,
            ledger=StepLedger(num_spans, slots, 8),
            replies=KeptReplies(num_spans, slots, 1 << 24),
            adapters=SequenceAdapters(slots),
            num_slots=slots,
            default_lease_s=60.0,
            max_lease_s=3600.0,
            lease_tick_s=1e9,
            clock=lambda: self.now,
        )
        capture = Capture(self.table, self.engine.place_pages)
        self.snapshots = SnapshotTable(
            table=self.table,
            capture=capture,
            line_bytes=1,
            page_bytes=1,
            fingerprint=b"a model",
            lease_tick_s=1e9,
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
            stored_limit=STORED_LIMIT if host_bytes else 0,
        )
        self.waypoints = WaypointTable(self.table, capture, self.snapshots)
        self.scheduler = Scheduler(
            table=self.table,
            engine=self.engine,
            limits=limits,
            observer=Counts(),
            clock=lambda: self.now,
            waypoints=self.waypoints,
        )
        layout = make_layout(self.model, self.pool)
        host = files = directory = None
        if host_bytes:
            host = HostTier(layout, host_bytes, None)
        if state_dir is not None:
            directory = StateDirectory(state_dir)
            files = FileTier(directory, layout, FINGERPRINT, FILE_BYTES)
        self.tiers = Tiers(layout, FINGERPRINT, host, files, directory)
        self.moves = self.tiers.moves(
            self.model, self.pool, self.engine.transfer, self.snapshots, capture, self.table.adapters
        )
        self.exchange = self.tiers.exchange(self.model, self.pool, self.moves, self.snapshots, self.table.adapters)
        wholes = self.tiers.wholes(
            self.model, self.moves, self.table, self.engine.place_pages, self.scheduler.reserve_replies
        )
        in_order = InOrder(self.table, self.scheduler)
        self.passage = Passage(self.table, in_order, self.exchange, wholes)
        self.states = States(
            table=self.table,
            capture=capture,
            snapshots=self.snapshots,
            scheduler=self.scheduler,
            in_order=in_order,
            moves=self.moves,
        )

    async def close(self) -> None:
        """End what is under way, and the tiers."""
        await self.passage.close()
        await self.states.close()
        await self.tiers.close()

    def reference(self, history: Sequence[Entry]) -> tuple[int, Reference]:
        """A reference that was fed a history, which gave the same bits again; and its line."""
        line = self._reference_lines.pop()
        numbers = layer_numbers(self.model)
        places = [[i for i, number in enumerate(numbers) if number in span] for span in self.model.spans]
        made = Reference(self._reference_executor, self._reference_pool, line, places)
        for entry in history:
            again = made.run(entry.batch, entry.row, entry.committed, entry.replayed, entry.position, entry.stop)
            np.testing.assert_array_equal(again, entry.output)
        return line, made

    def forget(self, line: int) -> None:
        """A reference is over."""
        self._reference_lines.append(line)

    def _batch(self, batch: StepBatch) -> Callable[[Array], None]:
        handles = {}
        for row, line in enumerate(batch.control[2, :-1].tolist()):
            if line > 0:
                (slot,) = np.flatnonzero(self.table.write_line == line).tolist()
                handles[row] = int(self.table.handles(np.array([slot]))[0])
        # What the scheduler keeps of it may be written again.
        kept = replace(batch, control=batch.control.copy(), hidden=tuple(piece.copy() for piece in batch.hidden))
        return self._on_rows(kept, handles)
