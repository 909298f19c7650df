"""A scheduler with its table, and an engine that computes checksums instead of layers.

The stand-in engine keeps for each (span, line) the list of committed tokens and the drafts in the ring, by the same
control tensor as the real one. A token's output is a checksum of all tokens up to it, so a step that is lost,
repeated, run out of order or on another's line shows in the numbers. A row's adapter, which is what the device has in
the row's slot at that time, is added to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.adapter_rig import FakeContent, FakeDevice
from rigs.limits import make_limits

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import ANONYMOUS
from deltaline_server.scheduling.in_flight import BatchEngine
from deltaline_server.scheduling.observer import BatchTiming
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.snapshots.sequences.in_order import InOrder
from deltaline_server.snapshots.states import States
from deltaline_server.step import (
    WAYPOINT_TOKENS,
    OutputRows,
    RowKind,
    RowOutcome,
    SpanShapes,
    StepForm,
    StepRequest,
    StepResult,
)
from deltaline_server.tables.adapter_places import AdapterPlaces
from deltaline_server.tables.adapter_registry import AdapterRegistry
from deltaline_server.tables.captured.capture import Capture
from deltaline_server.tables.captured.snapshot import SnapshotDescription
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.captured.waypoints import WaypointTable
from deltaline_server.tables.kept_replies import KeptReplies
from deltaline_server.tables.ledger import StepLedger
from deltaline_server.tables.lines import LinePool
from deltaline_server.tables.pages import PagePool, PagesPlaced
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequence_adapters import SequenceAdapters
from deltaline_server.tables.sequences import SequenceTable

MAX_DRAFT = 4
PREFILL, DECODE, VERIFY = RowKind.PREFILL, RowKind.DECODE, RowKind.VERIFY


def checksum(tokens: Sequence[float], adapter: int = 0) -> float:
    """adapter: below 256, so that the sum stays exact in float32."""
    return sum((i + 1) * token for i, token in enumerate(tokens)) % 65521 + 65536 * adapter


class ChecksumEngine:
    """Runs batches when told to, or at once (`eager`)."""

    def __init__(self, eager: bool = True, device: FakeDevice | None = None) -> None:
        self.eager, self.fail_next = eager, False
        self.device = device
        self.adapter: dict[tuple[int, int], int] = {}
        self.tokens: dict[tuple[int, int], list[float]] = {}
        self.drafts: dict[tuple[int, int, int], list[float]] = {}
        self.waiting: list[tuple[StepBatch, Callable[[BatchResult], None], list[PagesPlaced]]] = []
        self.batches: list[StepBatch] = []
        self.poison_token: float | None = None
        self.page_size = 0
        self.page_of: dict[tuple[int, int], int] = {}
        self.keys: dict[tuple[int, int, int], float] = {}

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
        self.batches.append(batch)
        if self.device is not None:
            self.device.used += self.slots_of(batch)
        self.waiting.append((batch, on_done, []))
        if self.eager:
            self.run()

    def poll(self) -> bool:
        return False

    def run(self) -> None:
        """Compute the batch that was submitted first."""
        batch, on_done, behind = self.waiting.pop(0)
        result = self.compute(batch)
        waiting, self.waiting = self.waiting, []
        for placed in behind:
            self.place(placed)
        self.waiting = waiting
        for slot in self.slots_of(batch):
            assert self.device is not None
            self.device.used.remove(slot)
        on_done(result)

    def keep_keys(self, span: int, line: int, position: int, new: list[float]) -> None:
        """Keep tokens in the line's pages, as far as the batches have told these."""
        for at, token in enumerate(new, start=position):
            self.keys[span, self.page_of[line, at // self.page_size], at % self.page_size] = token

    def keys_of(self, span: int, line: int, length: int) -> list[float]:
        """The first tokens in the line's pages."""
        places = [divmod(at, self.page_size) for at in range(length)]
        return [self.keys[span, self.page_of[line, place], offset] for place, offset in places]

    def place(self, placed: PagesPlaced) -> None:
        """Give lines the pages of others, and copy pages, behind the batches that wait."""
        if self.waiting:
            self.waiting[-1][2].append(placed)
            return
        for line, pages in zip(placed.lines.tolist(), placed.pages.tolist(), strict=True):
            self.page_of |= {(line, place): page for place, page in enumerate(pages)}
        for source, target in placed.copies.T.tolist():
            self.keys |= {(span, target, at): key for (span, page, at), key in self.keys.items() if page == source}

    def zero(self, lines: list[int]) -> None:
        """Forget the lines' pages, of which the next owner is told anew."""
        self.page_of = {(line, place): page for (line, place), page in self.page_of.items() if line not in lines}

    @staticmethod
    def slots_of(batch: StepBatch) -> list[int]:
        """The slots on the device that a batch uses."""
        slots = [] if batch.adapter_places is None else sorted(set(batch.adapter_places.tolist()) - {-1})
        assert batch.adapter_places is None or slots, "a batch without adapters has no slots at all"
        return slots

    def adapter_of(self, batch: StepBatch, row: int) -> int:
        """The adapter that a row of a batch is computed with, 0 for none."""
        slot = -1 if batch.adapter_places is None else int(batch.adapter_places[row])
        if slot == -1:
            return 0
        assert self.device is not None and slot >= 0
        content = self.device.slots[slot]
        assert content is not None, "the slot is empty"
        return int(content)

    @staticmethod
    def waypoints_of(batch: StepBatch, row: int) -> list[tuple[int, int]]:
        """Of a row: the tokens before each of its waypoints, and their lines."""
        if batch.waypoints is None:
            return []
        rows, tokens, lines = batch.waypoints
        used = {*batch.control[1, :-1].tolist(), *batch.control[2, :-1].tolist()}
        assert not used & set(lines.tolist()) and len(set(lines.tolist())) == len(lines) and lines.min() > 0
        found = list(zip(tokens[rows == row].tolist(), lines[rows == row].tolist(), strict=True))
        length = int(np.diff(batch.control[0])[row])
        assert all(row >= batch.num_short and 0 < at <= length and at % WAYPOINT_TOKENS == 0 for at, _ in found)
        return found

    def release(self) -> None:
        """Compute all that waits, and from now on what comes."""
        self.eager = True
        while self.waiting:
            self.run()

    def compute(self, batch: StepBatch) -> BatchResult:
        num_rows, hidden = batch.control.shape[1] - 1, np.concatenate(batch.hidden)
        assert len(hidden) == batch.num_tokens
        if self.fail_next:
            self.fail_next = False
            for line in batch.control[2, :num_rows].tolist():
                self.tokens[batch.span, line] = [0.5]  # whatever it had got to
                self.adapter[batch.span, line] = -1  # what runs behind it is thrown away
            for line in [] if batch.waypoints is None else batch.waypoints[2].tolist():
                self.tokens[batch.span, line] = [0.5]
            return BatchResult(hidden[:0], np.zeros(num_rows, dtype=bool), failed=True)
        if batch.new_pages is not None:
            for line, place, page in batch.new_pages.T.tolist():
                self.page_of[line, place] = page
        out = np.full_like(hidden, np.nan)
        finite = np.ones(num_rows, dtype=bool)
        lengths = np.diff(batch.control[0])
        assert (lengths[: batch.num_short] <= MAX_DRAFT).all()
        assert (lengths[batch.num_short :] > MAX_DRAFT).all()
        is_padding = batch.control[1, :num_rows] == -1
        writes = batch.control[2, :num_rows][~is_padding]
        assert len(set(writes.tolist())) == len(writes) and (writes > 0).all()
        assert (batch.control[2, :num_rows][is_padding] == -1).all()
        assert batch.wanted is not None or not is_padding.any(), "outputs of padding are not to be copied"
        for row in range(num_rows):
            begin, end = batch.control[0, row], batch.control[0, row + 1]
            if is_padding[row]:
                finite[row] = np.isfinite(hidden[begin:end]).all()  # a residual carries on what came
                continue
            read, write, committed, replayed, half, position = batch.control[1:, row].tolist()
            new = hidden[begin:end, 0].tolist()
            adapter = self.adapter_of(batch, row)
            assert not read or self.adapter[batch.span, read] in (adapter, -1), "a state goes on under another adapter"
            was_lost = bool(read) and self.adapter[batch.span, read] == -1
            self.adapter[batch.span, write] = adapter
            state = list(self.tokens[batch.span, read]) if read else []
            state += self.drafts[batch.span, read, half][:replayed] if replayed else []
            assert was_lost or position == len(state)
            if batch.new_pages is not None and not was_lost:
                self.keep_keys(batch.span, write, position, new)
                assert self.keys_of(batch.span, write, position + len(new)) == state + new
            for t in range(len(new)):
                out[begin + t] = checksum(state + new[: t + 1], adapter)
            for tokens, line in self.waypoints_of(batch, row):
                self.tokens[batch.span, line] = state + new[:tokens]
                self.adapter[batch.span, line] = adapter
            if self.poison_token in new:
                finite[row] = False
            if committed:
                state += new
            else:
                self.drafts[batch.span, write, 1 - half] = new
            self.tokens[batch.span, write] = state
        returned = out if batch.wanted is None else out[batch.wanted]
        return BatchResult(returned, finite, 1e-6, 2e-6, 3e-6)


class Counts:
    """An observer that adds up."""

    def __init__(self) -> None:
        self.total: dict[str, int] = {}

    def add(self, name: str, count: int) -> None:
        self.total[name] = self.total.get(name, 0) + count

    def batch_done(self, timing: BatchTiming) -> None:
        assert timing.busy_s >= 0 and all(waited_s >= 0 for _, _, waited_s in timing.queued)
        self.add("batches", 1)

    def steps(self, outcome: str, count: int) -> None:
        self.add(outcome, count)

    def refused(self, reason: Reason, count: int) -> None:
        self.add(reason.name, count)

    def drafts(self, sent: int) -> None:
        self.add("drafts", sent)

    def accepted(self, count: int) -> None:
        self.add("accepted", count)


class Rig:
    """Table, scheduler and engine with a clock that stands still until it is moved."""

    def __init__(
        self,
        *,
        slots: int = 8,
        spans: int = 1,
        eager: bool = True,
        queue_rows: int = 64,
        queue_bytes: int = 1 << 20,
        reply_bytes: int = 1 << 20,
        chunk_tokens: int = 64,
        batch_rows: int = 10_000,
        long_rows: int = 10_000,
        adapter_slots: int = 0,
        snapshot_lines: int = 0,
        pages: int = 0,
        page_size: int = 4,
        max_context: int = 0,
        paged_spans: Sequence[int] = (0,),
        engine: BatchEngine | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """adapter_slots: on a device whose copies end when told; 0 for a server without adapters. pages: of keys; 0 for
        a model without attention. max_context: 0 for what all pages hold. engine, clock: the scheduler's, in place of
        the rig's own."""
        self.now = 100.0
        self.zeroed: list[int] = []
        self.device = FakeDevice(adapter_slots)
        self.engine = ChecksumEngine(eager, self.device)
        self.adapter_slots = AdapterPlaces(adapter_slots or 1, self.device, lambda: self.now)
        self.registry = AdapterRegistry(10_000, self.adapter_slots)
        self.counts = Counts()
        self.pages = None
        if pages:
            self.engine.page_size = page_size
            self.pages = PagePool(
                num_pages=pages,
                page_size=page_size,
                max_context=max_context or pages * page_size,
                num_lines=slots + snapshot_lines,
                spans=paged_spans,
            )
        self.lines = LinePool(slots + snapshot_lines, self.zero, self.pages, snapshot_lines)
        self.table = SequenceTable(
            lines=self.lines,
            ledger=StepLedger(spans, slots, max_in_flight=8),
            replies=KeptReplies(spans, slots, reply_bytes),
            adapters=SequenceAdapters(slots, self.registry if adapter_slots else None),
            num_slots=slots,
            default_lease_s=60.0,
            max_lease_s=3600.0,
            lease_tick_s=1.0,
            clock=lambda: self.now,
        )
        self.capture = Capture(self.table, self.engine.place)
        self.snapshots = SnapshotTable(
            table=self.table,
            capture=self.capture,
            line_bytes=100,
            page_bytes=10,
            fingerprint=b"a model",
            lease_tick_s=1.0,
            clock=lambda: self.now,
            wall_clock=lambda: 1e9 + self.now,
        )
        self.waypoints = WaypointTable(self.table, self.capture, self.snapshots)
        self.scheduler = Scheduler(
            table=self.table,
            engine=engine or self.engine,
            limits=make_limits(
                max_draft_tokens=MAX_DRAFT,
                queue_rows=queue_rows,
                queue_bytes=queue_bytes,
                chunk_tokens=chunk_tokens,
                short_rows=batch_rows,
                long_rows=long_rows,
            ),
            observer=self.counts,
            clock=clock or (lambda: self.now),
            waypoints=self.waypoints,
        )
        self.states = States(
            table=self.table,
            capture=self.capture,
            snapshots=self.snapshots,
            scheduler=self.scheduler,
            in_order=InOrder(self.table, self.scheduler),
        )
        self.adapter_slots.on_copied = self.scheduler.adapter_wait.copied

    def zero(self, lines: NDArray[np.int64]) -> None:
        self.zeroed += lines.tolist()
        self.engine.zero(lines.tolist())

    def load(self, *names: str) -> None:
        """Register adapters by their numbers, which tell in the outputs."""
        for name in names:
            self.registry.reserve(10)
            self.registry.register(name, FakeContent(name.encode()), is_pinned=False)

    def open(self, count: int = 1, adapter: str = "") -> list[int]:
        return [int(handle) for handle in self.table.open(count, adapter=adapter).handles]

    def close(self, *handles: int) -> list[SequenceState]:
        return self.table.close(self.table.server_epoch, np.array(handles, dtype=np.uint64))

    def slots(self, *handles: int) -> NDArray[np.int64]:
        return self.table.lookup(self.table.server_epoch, np.array(handles, dtype=np.uint64))[0]

    async def snapshot(self, *handles: int, **changes: Any) -> list[SnapshotDescription]:
        options: dict[str, Any] = {"principal": ANONYMOUS, "lease_s": None, "is_pinned": False} | changes
        made = await self.states.create(self.table.server_epoch, np.array(handles, dtype=np.uint64), **options)
        self.snapshots.check_integrity()
        return made

    async def fork(self, *handles: int, count: int = 1, **changes: Any) -> list[int]:
        options: dict[str, Any] = {"principal": ANONYMOUS, "lease_s": None} | changes
        opened = await self.states.fork(self.table.server_epoch, np.array(handles, dtype=np.uint64), count, **options)
        self.snapshots.check_integrity()
        return [int(handle) for handle in opened.handles]

    def restore(self, *ids: bytes, **changes: Any) -> list[int]:
        options: dict[str, Any] = {"principal": ANONYMOUS, "lease_s": None} | changes
        opened = self.states.restore(ids, **options)
        self.snapshots.check_integrity()
        return [int(handle) for handle in opened.handles]

    def captured(self, *handles: int) -> list[CapturedState]:
        """The states of sequences with nothing in flight."""
        slots = self.slots(*handles)
        states = self.capture.capture(slots, self.capture.progress(slots))
        self.table.check_integrity()
        return states

    def restored(self, *states: CapturedState, count: int = 1) -> list[int]:
        """Sequences that begin from states, `count` of each."""
        handles = self.capture.restore(states, count, ANONYMOUS, None).handles
        self.table.check_integrity()
        return [int(handle) for handle in handles]

    def released(self, *states: CapturedState) -> None:
        for state in states:
            self.capture.release(state)
        self.table.check_integrity()

    def request(self, *rows: tuple[int, RowKind, int, int, int, list[float]], **changes: Any) -> StepRequest:
        """rows: (handle, kind, step, position, accepted, tokens)."""
        lengths = [len(row[5]) for row in rows]
        tokens = np.array([token for row in rows for token in row[5]], dtype=np.float32)
        form: dict[str, Any] = {
            "server_epoch": self.table.server_epoch,
            "span": 0,
            "handle": np.array([row[0] for row in rows], dtype=np.uint64),
            "kind": np.array([row[1] for row in rows], dtype=np.uint8),
            "accepted": np.array([row[4] for row in rows], dtype=np.int32),
            "query_start_loc": np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            "output": OutputRows.ALL,
            "priority": 0,
            "shapes": SpanShapes(2, 4),
            "waypoints": {},
        }
        step: dict[str, Any] = {
            "step": np.array([row[2] for row in rows], dtype=np.int64),
            "position": np.array([row[3] for row in rows], dtype=np.int64),
            "hidden": np.repeat(tokens[:, None], 2, axis=1),
        }
        form |= {name: change for name, change in changes.items() if name in form}
        step |= {name: change for name, change in changes.items() if name not in form}
        return StepRequest(StepForm(**form), **step)

    def submit(self, request: StepRequest) -> asyncio.Future[StepResult]:
        """The future of the result, which may be cancelled."""
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self.scheduler.submit(request, lambda result: None if future.done() else future.set_result(result))
        return future

    async def step(self, *rows: tuple[int, RowKind, int, int, int, list[float]], **changes: Any) -> StepResult:
        result = await self.submit(self.request(*rows, **changes))
        self.scheduler.settle()  # what happens soon behind the answer
        self.table.check_integrity()
        self.waypoints.check_integrity()
        return result


async def turns(count: int = 10) -> None:
    """Let the event loop do what is ready, and what that makes ready."""
    for _ in range(count):
        await asyncio.sleep(0)


@contextlib.contextmanager
def refuses(reason: Reason) -> Iterator[pytest.ExceptionInfo[RequestError]]:
    """What is inside raises a RequestError with this reason."""
    with pytest.raises(RequestError) as caught:
        yield caught
    assert caught.value.refusal.reason is reason


def outputs(result: StepResult, row: int = 0) -> list[float]:
    begin, end = result.output_start_loc[row], result.output_start_loc[row + 1]
    return [float(x) for x in result.hidden[begin:end, 0]]


def reason(result: StepResult, row: int = 0) -> Reason | None:
    refusal = result.refusals.get(row)
    assert (refusal is not None) == (result.outcome[row] == RowOutcome.REFUSED)
    return refusal.reason if refusal else None
