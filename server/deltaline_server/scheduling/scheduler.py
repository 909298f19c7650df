"""The scheduler: takes step requests, merges their rows into batches for the engine, and completes them.

Everything here runs on one event loop; the engine calls back from its own thread and is brought over. Two batches may
be in flight, so that the device finds the next one when it ends one; the second is formed as late as is safe, so that
rows which come meanwhile are in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.batch import BatchResult
from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.scheduling.adapters.adapter_wait import AdapterWait
from deltaline_server.scheduling.adapters.batch_adapters import BatchAdapters
from deltaline_server.scheduling.admit import admit
from deltaline_server.scheduling.batch import lay_out
from deltaline_server.scheduling.batch_time import BatchTimeModel
from deltaline_server.scheduling.in_flight import BatchEngine, BatchInFlight, InFlight
from deltaline_server.scheduling.observer import Observer
from deltaline_server.scheduling.pending import PendingStep, RowState
from deltaline_server.scheduling.queue import Load, Queue
from deltaline_server.scheduling.scheduled_rows import ScheduledRows
from deltaline_server.scheduling.step_index import OnReached
from deltaline_server.scheduling.tick import Tick
from deltaline_server.scheduling.use import Use
from deltaline_server.scheduling.waypoints import Waypoints
from deltaline_server.step import Limits, RowKind, RowOutcome, StepRequest, StepResult
from deltaline_server.tables.captured.waypoints import WaypointTable
from deltaline_server.tables.kept_replies import Answers
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.sequences import SequenceTable

_log = logging.getLogger(__name__)

MAX_BATCHES_IN_FLIGHT = 2
# The timers of an event loop that sleeps are that coarse (epoll counts milliseconds, and rounds up).
TIMER_S = 1e-3
# Turns of the event loop that a reply takes from its future to gRPC: a stream's goes through a callback and a task.
GRPC_REPLY_TURNS = 3


class Scheduler:
    """Queue, batches and completion of steps. Construct it on any thread; use it on one event loop."""

    def __init__(
        self,
        *,
        table: SequenceTable,
        engine: BatchEngine,
        limits: Limits,
        observer: Observer,
        clock: Callable[[], float],
        waypoints: WaypointTable,
    ) -> None:
        """clock: monotonic seconds, called on the engine's threads too."""
        self._table, self._observer, self._clock = table, observer, clock
        self._queue = Queue(table, limits, observer, clock)
        places, tick = self._queue.places, Tick(self._guarded, self._pump)
        self.adapter_wait = AdapterWait(table.adapters, self._queue.ready, self._guarded, self._pump, tick.begin)
        tick.on_tick = self.adapter_wait.ticked, lambda: places.has_any
        self._batch_time = BatchTimeModel(table.ledger.num_spans, limits.chunk_tokens)
        self._in_flight = InFlight(engine, self._landed, clock)
        self._waypoints = Waypoints(waypoints, self._queue, self._pump_soon)
        table.on_freed, places.wake, places.on_kept = self._freed, self._pump_soon, tick.begin
        table.on_let_go = partial(self._guarded, self._queue.let_go)
        self._unsettled: tuple[BatchInFlight, BatchResult] | None = None
        self._due: asyncio.TimerHandle | None = None
        self._num_awaited = 0
        self._last_completed_s = float("-inf")
        self._pump_is_due = self._is_stopped = self._is_halted = False
        self.has_failed = False
        """Whether the scheduler itself broke: it runs nothing more, and the process should end."""

    def load(self) -> Load:
        return self._queue.load()

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """As BatchTimeModel measures it."""
        return self._batch_time.prefill_tokens_per_s

    @property
    def use(self) -> Mapping[int, Use]:
        """What each principal has in the queue, by its number."""
        return self._queue.use

    async def drained(self) -> None:
        """Return once nothing is queued or running."""
        await self._queue.until_empty()

    def stop(self) -> None:
        """Refuse what waits and what comes, UNAVAILABLE STOPPING; what has begun is finished. Idempotent."""
        self._is_stopped = True
        self._queue.refuse_all(Reason.STOPPING)
        self._queue.places.run()
        self._queue.finish()

    def halt(self) -> None:
        """Run nothing more, the engine is about to close: what has begun stays as it is. After `stop`. Idempotent."""
        self._is_halted = True

    def submit(
        self, request: StepRequest, on_done: Callable[[StepResult], None], reply_turns: int = GRPC_REPLY_TURNS
    ) -> None:
        """Judge every row, queue those that are new, and call `on_done` once with the whole result, maybe at once.

        The work is done and its reply is kept whoever has gone meanwhile; `on_done` may not raise. reply_turns: of the
        event loop, from `on_done` until the reply has left: the books are settled behind it. Raises RequestError
        (QUEUE_FULL, QUOTA_EXCEEDED, REPLY_BYTES_EXHAUSTED, STOPPING) when it can't be taken; then no row was touched.
        """
        if self._unsettled is not None:
            self.settle()
        if self._is_stopped or self.has_failed:
            raise RequestError(Reason.STOPPING, "the server is stopping")
        pending, live_slots = admit(request, self._table, self._queue)
        pending.arrival_s, pending.on_done, pending.reply_turns = self._clock(), on_done, reply_turns
        if not pending.is_whole:
            self._count_others(pending)
        if pending.can_finish:
            pending.finish()
        else:
            self._num_awaited -= pending.num_of_kind[RowKind.DECODE] + pending.num_of_kind[RowKind.VERIFY]
            self._queue.add(pending)
            if pending.left:
                self._waypoints.add(pending)
            if self._in_flight.batches or self._pump_is_due:
                self._pump_soon()
            else:  # the device has nothing to do: a turn of the loop is time lost
                self._guarded(self._pump)
        self._table.touch(live_slots)  # last: it need not keep the device waiting

    def in_order(self, slots: Slots, on_reached: OnReached) -> None:
        """Call `on_reached` once, maybe at once, when the steps of slots (none twice) that were taken so far are over;
        those that come meanwhile wait until it has returned, and until the future is done that it returns.

        It gets the slots of which such a step was refused; it may not raise. Raises RequestError STOPPING.
        """
        self.settle()
        if self._is_stopped or self.has_failed:
            raise RequestError(Reason.STOPPING, "the server is stopping")
        self._queue.places.take(slots, on_reached)
        self._guarded(self._queue.places.run)

    def reserve_replies(self, principal: Principal, num_bytes: int) -> None:
        """Set bytes aside for replies that come from elsewhere. Raises RequestError REPLY_BYTES_EXHAUSTED."""
        self._queue.reserve_replies(principal, num_bytes)

    def settle(self) -> None:
        """Bring ledger, kept replies and leases up to the batch that is done: before anything reads them."""
        if self._unsettled is not None:
            self._guarded(self._settle)
            self._pump_soon()

    def _count_others(self, pending: PendingStep) -> None:
        """Count the rows of a request that were not admitted."""
        for refusal in pending.refusals.values():
            self._observer.refused(refusal.reason, 1)
        self._observer.steps("replayed", pending.outcome.tolist().count(RowOutcome.REPLAYED))
        self._observer.steps("joined", len(pending.joins))

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do a part of the scheduler's work; a bug in it ends the scheduler instead of leaving callers to wait."""
        if self.has_failed or self._is_halted:
            return
        try:
            work(*arguments)
        except Exception:
            _log.exception("the scheduler failed; it runs nothing more")
            self.has_failed = True

    # -- forming batches -------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Form a batch after the callbacks that are ready now, so that requests that came together run together."""
        if not self._pump_is_due and len(self._in_flight.batches) < MAX_BATCHES_IN_FLIGHT:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._guarded, self._pump_if_due)

    def _pump_if_due(self) -> None:
        if self._pump_is_due:
            self._pump()

    def _pump(self, has_waited: bool = False) -> None:
        """Form and run batches while there is room for one, something to run, and no reason to wait (any longer)."""
        self._pump_is_due = False
        now_s, queue, batches = self._clock(), self._queue, self._in_flight.batches
        if queue.deadlines and queue.deadlines[0][0] <= now_s:
            queue.drop_overdue(now_s)
        if queue.places.has_any:
            queue.places.run()
        while len(batches) < MAX_BATCHES_IN_FLIGHT and queue.ready_spans:
            if batches and not has_waited and self._must_wait(now_s):
                break
            for span in queue.spans_in_order():
                if self._start(span, now_s):
                    break
        if queue.places.has_any and not batches:  # what was refused meanwhile may have been all that they waited for
            queue.places.run()
            if queue.ready_spans:
                self._pump_soon()
        if queue.ended:
            queue.finish()

    def _must_wait(self, now_s: float) -> bool:
        """Whether the batch behind the running one should wait for rows that may come, and see to it that it ends.

        It need not when all who were answered last have sent their next rows, nor when no short rows are about.
        """
        has_short = any(ready.num_short for ready in self._queue.ready)
        if (has_short and self._num_awaited <= 0) or not (has_short or self._batch_time.expects_short(now_s)):
            return False
        first = self._in_flight.batches[0]
        began_s = max(first.submitted_s, self._last_completed_s)
        due_s = self._batch_time.due_s(began_s, first.predicted_s)
        wait_s = due_s - now_s - (0 if self._in_flight.is_polled else TIMER_S / 2)
        if wait_s < 0:
            return False
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(wait_s, self._guarded, self._waited)
        return True

    def _waited(self) -> None:
        self._due = None
        self._pump(has_waited=True)

    def _start(self, span: int, now_s: float) -> bool:
        """Choose rows, whose commits are fixed from here on, and run them; tell whether there were any."""
        ready, adapters = self._queue.ready[span], self.adapter_wait.begin()
        before_s = self._in_flight.batches[-1].predicted_s if self._in_flight.batches else 0.0
        budget = self._batch_time.chunk_tokens(span, ready.num_short, before_s, now_s) if ready.long.rows else 0
        short, long = ready.take(budget, adapters)
        scheduled: list[ScheduledRows] = []
        num_short, num_awaited = self._begin(short, scheduled)
        num_long = self._begin(long, scheduled)[1] if long else 0
        if num_awaited or num_long:
            waypoints = self._waypoints.take(num_short, scheduled[len(short) :]) if num_long else None
            self._run(span, num_short, num_awaited, scheduled, adapters, waypoints)
            return True
        for rows in scheduled:  # padding alone, in front of rows of its request
            rows.pending.cursor[rows.taken] += rows.lengths
        if adapters is not None:
            adapters.release()
        return False

    def _begin(self, chosen: list[ScheduledRows], scheduled: list[ScheduledRows]) -> tuple[int, int]:
        """Fix the commits of rows that begin, and add all rows to `scheduled`, those that conflict as padding.

        Returns how many they are, and how many of them run.
        """
        num_rows = num_running = 0
        for rows in chosen:
            admission = rows.pending.admission
            if admission.has_commits and not rows.cursor:
                conflicts = self._table.ledger.begin(rows.pending.span, admission, rows.index)
                for index, refusal in conflicts.items():
                    self._queue.refuse(rows.pending, index, refusal)
                if conflicts:
                    rows = rows.again()
            if admission.has_replays and not rows.cursor:
                self._observer.accepted(int(admission.num_replayed[rows.index].sum()))
            scheduled.append(rows)
            num_rows += len(rows.taken)
            num_running += len(rows.index)
        return num_rows, num_running

    def _run(
        self,
        span: int,
        num_short: int,
        num_awaited: int,
        scheduled: list[ScheduledRows],
        adapters: BatchAdapters | None,
        waypoints: NDArray[np.int32] | None,
    ) -> None:
        table, queue = self._table, self._queue
        batch = lay_out(scheduled, table, num_short, adapters, waypoints)
        now_s = self._clock()
        in_flight = BatchInFlight(scheduled, batch, now_s, now_s, adapters, num_awaited)
        in_flight.num_tokens = int(batch.control[0, -1])
        in_flight.num_long_tokens = in_flight.num_tokens - int(batch.control[0, num_short])
        self._in_flight.start(in_flight)
        if waypoints is not None:
            self._waypoints.table.share_pages()
        # The device works while the books are brought up to what it was given.
        for rows in scheduled:
            queue.given(rows)
            if table.num_frozen_reads:
                table.end_frozen_reads(span, rows.slots)
            table.read_line[span][rows.slots] = table.write_line[rows.slots]
            if rows.num_of_kind[RowKind.VERIFY]:
                is_verify = rows.pending.kind[rows.index] == RowKind.VERIFY
                table.draft_half[span, rows.slots[is_verify]] ^= 1
        in_flight.predicted_s = self._batch_time.predicted_s(span, num_short, in_flight.num_long_tokens)
        queue.last_span = span

    # -- completing them -------------------------------------------------------------------------------------------

    def _landed(self, batch: BatchInFlight, result: BatchResult) -> None:
        self._guarded(self._complete, batch, result)

    def _complete(self, batch: BatchInFlight, result: BatchResult) -> None:
        """A batch is done: answer, settle the books, and form the next one.

        When the device has another batch, or nothing is ready to run, callers are answered first; until the books are
        settled the rows count as in flight. Else the device comes first.
        """
        if self._unsettled is not None:
            self.settle()
        if batch.adapters is not None:
            batch.adapters.release()
        if self._due is not None:
            self._due.cancel()
            self._due = None
        done_s, last_s = batch.done_s, self._last_completed_s
        batch.busy_s = done_s - max(batch.submitted_s, last_s)
        if last_s > batch.submitted_s:  # it waited in the engine
            stages_s = result.copy_in_s + result.compute_s + result.copy_out_s
            batch.began_s = max(batch.submitted_s, done_s - stages_s)
        self._last_completed_s, self._num_awaited = done_s, batch.num_awaited
        batch.take_outputs(result)
        self._unsettled = batch, result
        may_answer_first = self._in_flight.batches or not self._queue.ready_spans
        if may_answer_first and (turns := batch.answer(result)):
            self._settle_later(turns)
        else:
            self._settle_and_pump()

    def _settle_later(self, turns: int) -> None:
        """Settle, and form the next batch, in so many turns of the event loop: the replies leave before."""
        if turns:
            asyncio.get_running_loop().call_soon(self._settle_later, turns - 1)
        else:
            self._guarded(self._settle_and_pump)

    def _settle_and_pump(self) -> None:
        if self._unsettled is not None:
            self._settle()
        self._pump()

    def _settle(self) -> None:
        assert self._unsettled is not None
        (batch, result), self._unsettled = self._unsettled, None
        row = 0
        for rows in batch.scheduled:
            if len(rows.index):
                self._settle_rows(rows, result.finite[row : row + len(rows.taken)][rows.running], result.is_lost)
            row += len(rows.taken)
        if not result.failed:
            span, num_short = batch.batch.span, batch.batch.num_short
            self._batch_time.measured(span, num_short, batch.num_long_tokens, result.compute_s, self._last_completed_s)
        self._observer.batch_done(batch.timing(result))

    def _settle_rows(self, rows: ScheduledRows, sound: NDArray[np.bool_], is_lost: bool) -> None:
        pending = rows.pending
        self._queue.returned(rows)
        if pending.has_failures:
            sound = sound & (pending.state[rows.index] != RowState.DISCARDED)
        if sound.all():
            if rows.is_last:
                self._finish_rows(pending, rows.index, rows.slots)
            return
        if rows.is_last and sound.any():
            self._finish_rows(pending, rows.index[sound], rows.slots[sound])
        for slot in rows.slots[~sound].tolist():
            self._queue.poison(slot, is_lost)
            self._waypoints.table.drop(slot)

    def _freed(self, slot: int) -> None:
        """The sequence in a slot is over."""
        self._queue.places.leave(slot)
        self._waypoints.table.drop(slot)

    def _finish_rows(self, pending: PendingStep, index: NDArray[np.int64], slots: Slots) -> None:
        """Rows (positions in the admission, and their slots) are done."""
        table, span = self._table, pending.span
        table.ledger.finish(span, pending.admission, index)
        if pending.left:
            self._waypoints.done(pending, index, slots)
        if self._waypoints.table.of_slot:
            self._waypoints.table.pass_by(span, slots)
        rows = pending.admission.rows[index]
        made = pending.request, pending.outputs, pending.output_start, pending.position
        table.replies.put(span, Answers(*made, slots, rows, pending.left), pending.reserved_bytes[index])
        self._queue.done(pending, index)
        table.touch(slots)
        table.settle(slots)
        self._observer.steps("executed", len(index))
        if pending.num_of_kind[RowKind.VERIFY]:
            is_verify = pending.kind[index] == RowKind.VERIFY
            self._observer.drafts(int(pending.length[index][is_verify].sum()))
