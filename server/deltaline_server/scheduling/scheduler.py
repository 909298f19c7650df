"""The scheduler: takes step requests, merges their rows into batches for the engine, and completes them.

Knows jobs, cells and limits; not protobuf, gRPC or torch. Everything here runs on one event loop; the engine calls
back from its own thread and is brought over. Two batches may be in flight, so that the device finds the next one when
it ends one; the second is formed as late as is safe, so that rows which come meanwhile are in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.scheduling.adapter_wait import Residency
from deltaline_server.scheduling.admit import judge
from deltaline_server.scheduling.batch import Run, lay_out
from deltaline_server.scheduling.batch_adapters import BatchAdapters
from deltaline_server.scheduling.batch_time import Pace
from deltaline_server.scheduling.in_flight import BatchEngine, Flights
from deltaline_server.scheduling.observer import Observer
from deltaline_server.scheduling.pending import Job, RowState
from deltaline_server.scheduling.queue import JobQueue, Limits, Load
from deltaline_server.scheduling.scheduled_rows import Piece
from deltaline_server.step import BatchResult, RowKind, StepRequest, StepResult
from deltaline_server.tables.admission import Slots
from deltaline_server.tables.kept_replies import Answers
from deltaline_server.tables.sequences import SequenceTable

_log = logging.getLogger(__name__)

MAX_BATCHES_IN_FLIGHT = 2
# The timers of an event loop that sleeps are that coarse (epoll counts milliseconds, and rounds up).
TIMER_S = 1e-3
# Turns of the event loop that a reply takes from its future to gRPC: a stream's goes through a callback and a task.
REPLY_TURNS = 3


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
    ) -> None:
        """clock: monotonic seconds, called on the engine's threads too."""
        self._table, self._observer, self._clock = table, observer, clock
        self._queue = JobQueue(table, limits, observer)
        self.residency = Residency(table.bindings, self._queue.ready, self._guarded, self._pump)
        self._pace = Pace(table.ledger.num_spans, limits.chunk_tokens)
        self._flights = Flights(engine, self._landed, clock)
        self._unsettled: tuple[Run, BatchResult, float] | None = None
        self._due: asyncio.TimerHandle | None = None
        self._num_jobs = self._num_awaited = 0
        self._last_completed_s = float("-inf")
        self._pump_is_due = self._is_stopped = self._is_halted = False
        self.has_failed = False
        """Whether the scheduler itself broke: it runs nothing more, and the process should end."""

    def load(self) -> Load:
        return self._queue.load()

    async def drained(self) -> None:
        """Return once nothing is queued or running."""
        await self._queue.empty()

    def stop(self) -> None:
        """Refuse what waits and what comes, UNAVAILABLE STOPPING; what has begun is finished. Idempotent."""
        self._is_stopped = True
        self._queue.refuse_all(Reason.STOPPING)
        self._queue.finish()

    def halt(self) -> None:
        """Run nothing more, the engine is about to close: what has begun stays as it is. After `stop`. Idempotent."""
        self._is_halted = True

    def submit(self, request: StepRequest, on_done: Callable[[StepResult], None]) -> None:
        """Judge every row, queue those that are new, and call `on_done` once with the whole result, maybe at once.

        The work is done and its reply is kept whoever has gone meanwhile; `on_done` may not raise. Raises RequestError
        (QUEUE_FULL, REPLY_BYTES_EXHAUSTED, STOPPING) when the request can't be taken; then no row was touched.
        """
        self.settle()
        if self._is_stopped or self.has_failed:
            raise RequestError(Reason.STOPPING, "the server is stopping")
        verdict = judge(request, self._table, self._queue)
        admission = verdict.admission
        reserved_bytes = self._queue.reserve(request, admission, len(verdict.joins))
        if verdict.claim is not None:
            verdict.claim.take()
        self._table.ledger.take(request.form.span, admission)
        job = Job(request, admission, reserved_bytes, self._num_jobs, self._clock(), on_done)
        self._num_jobs += 1
        job.lay_out_outputs(admission.rows if job.is_whole else verdict.answered_rows)
        job.joins = verdict.joins
        for row, refusal in verdict.refusals.items():
            job.set_refusal(row, refusal)
            self._observer.refused(refusal.reason, 1)
        for row, reply in verdict.kept.items():
            job.replay(row, reply)
        if not job.is_whole:
            self._observer.steps("replayed", len(verdict.kept))
            self._observer.steps("joined", len(verdict.joins))
        if job.can_finish:
            job.finish()
        else:
            self._num_awaited -= job.num_of_kind[RowKind.DECODE] + job.num_of_kind[RowKind.VERIFY]
            self._queue.add(job)
            if self._flights or self._pump_is_due:
                self._pump_soon()
            else:  # the device has nothing to do: a turn of the loop is time lost
                self._guarded(self._pump)
        self._table.touch(verdict.live_slots)  # last: it need not keep the device waiting

    def _pump_soon(self) -> None:
        """Form a batch after the callbacks that are ready now, so that requests that came together run together."""
        if not self._pump_is_due and len(self._flights) < MAX_BATCHES_IN_FLIGHT:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._guarded, self._pump)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do a part of the scheduler's work; a bug in it ends the scheduler instead of leaving callers to wait."""
        if self.has_failed or self._is_halted:
            return
        try:
            work(*arguments)
        except Exception:
            _log.exception("the scheduler failed; it runs nothing more")
            self.has_failed = True

    def _pump(self, has_waited: bool = False) -> None:
        """Form and run batches while there is room for one, something to run, and no reason to wait (any longer)."""
        self._pump_is_due = False
        now_s = self._clock()
        self._queue.drop_overdue(now_s)
        while len(self._flights) < MAX_BATCHES_IN_FLIGHT and (spans := self._queue.ready_spans()):
            if self._flights and not has_waited and self._must_wait(now_s):
                break
            for span in spans:
                if self._start(span, now_s):
                    break
        self._queue.finish()

    def _must_wait(self, now_s: float) -> bool:
        """Whether the batch behind the running one should wait for rows that may come, and see to it that it ends.

        It need not when all who were answered last have sent their next rows, nor when no short rows are about.
        """
        has_short = any(ready.num_short for ready in self._queue.ready)
        if (has_short and self._num_awaited <= 0) or not (has_short or self._pace.expects_short(now_s)):
            return False
        run = self._flights.first
        began_s = max(run.submitted_s, self._last_completed_s)
        wait_s = self._pace.due_s(began_s, run.predicted_s) - now_s - (0 if self._flights.is_polled else TIMER_S / 2)
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
        ready, adapters = self._queue.ready[span], self.residency.begin()
        budget = self._pace.chunk_tokens(span, ready.num_short, now_s) if ready.has_long else 0
        chosen = ready.take(budget, adapters)
        short, long = ([began for piece in pieces if len((began := self._begin(piece)).index)] for pieces in chosen)
        if short or long:
            self._run(span, sum(len(piece.index) for piece in short), short + long, adapters)
        elif adapters is not None:
            adapters.let_go()
        return bool(short or long)

    def _begin(self, piece: Piece) -> Piece:
        """Fix the commits of the rows that begin with this piece; return it without those that conflict."""
        job = piece.job
        if job.admission.has_commits and not piece.cursor:
            conflicts = self._table.ledger.begin(job.span, job.admission, piece.index)
            if conflicts:
                for index, refusal in conflicts.items():
                    self._queue.refuse(job, index, refusal)
                piece = piece.without(list(conflicts))
        if job.admission.has_replays and not piece.cursor:
            self._observer.accepted(int(job.admission.num_replayed[piece.index].sum()))
        return piece

    def _run(self, span: int, num_short: int, pieces: list[Piece], adapters: BatchAdapters | None) -> None:
        table = self._table
        batch = lay_out(pieces, table, num_short, adapters)
        now_s = self._clock()
        run = Run(span, pieces, batch, now_s, now_s, adapters)
        self._flights.start(run)
        # The device works while the books are brought up to what it was given.
        for piece in pieces:
            self._queue.take(piece)
            table.read_line[span][piece.slots] = table.write_line[piece.slots]
            if piece.num_of_kind[RowKind.VERIFY]:
                is_verify = piece.job.kind[piece.index] == RowKind.VERIFY
                table.draft_half[span, piece.slots[is_verify]] ^= 1
        run.predicted_s = self._pace.predicted_s(span, num_short, run.num_long_tokens)
        self._queue.served(span)

    def _landed(self, run: Run, result: BatchResult, done_s: float) -> None:
        self._guarded(self._complete, run, result, done_s)

    def _complete(self, run: Run, result: BatchResult, done_s: float) -> None:
        """A batch is done: answer, settle the books, and form the next one.

        When the device has another batch, or nothing is ready to run, callers are answered first; until the books are
        settled the rows count as in flight. Else the device comes first.
        """
        self.settle()
        if run.adapters is not None:
            run.adapters.let_go()
        if self._due is not None:
            self._due.cancel()
            self._due = None
        busy_s = done_s - max(run.submitted_s, self._last_completed_s)
        if self._last_completed_s > run.submitted_s:  # it waited in the engine
            stages_s = result.copy_in_s + result.compute_s + result.copy_out_s
            run.began_s = max(run.submitted_s, done_s - stages_s)
        self._last_completed_s, self._num_awaited = done_s, run.batch.num_short
        run.take_outputs(result)
        self._unsettled = run, result, busy_s
        may_answer_first = self._flights or not self._queue.ready_spans()
        if may_answer_first and run.answer(result):
            self._settle_later(REPLY_TURNS)
        else:
            self._settle_later(0)

    def _settle_later(self, turns: int) -> None:
        """Settle, and form the next batch, in so many turns of the event loop: the replies leave before."""
        if turns:
            asyncio.get_running_loop().call_soon(self._guarded, self._settle_later, turns - 1)
        else:
            self.settle()
            self._pump()

    def settle(self) -> None:
        """Bring ledger, kept replies and leases up to the batch that is done: before anything reads them."""
        if self._unsettled is not None:
            done, self._unsettled = self._unsettled, None
            self._guarded(self._settle, *done)

    def _settle(self, run: Run, result: BatchResult, busy_s: float) -> None:
        row = 0
        for piece in run.pieces:
            self._settle_piece(piece, result.finite[row : row + len(piece.index)])
            row += len(piece.index)
        if not result.failed:
            self._pace.measured(
                run.span, run.batch.num_short, run.num_long_tokens, result.compute_s, self._last_completed_s
            )
        self._pump_soon()
        self._observer.batch_done(run.timing(result, busy_s))

    def _settle_piece(self, piece: Piece, sound: NDArray[np.bool_]) -> None:
        job = piece.job
        self._queue.returned(piece)
        if job.is_marred:
            sound = sound & (job.state[piece.index] != RowState.DOOMED)
        if sound.all():
            if piece.ends:
                self._finish_rows(job, piece.index, piece.slots)
            return
        if piece.ends and sound.any():
            self._finish_rows(job, piece.index[sound], piece.slots[sound])
        for slot in piece.slots[~sound].tolist():
            self._queue.poison(slot)

    def _finish_rows(self, job: Job, finished: NDArray[np.int64], slots: Slots) -> None:
        """Rows (positions in the job's admission, and their slots) are done."""
        table, admission, span = self._table, job.admission, job.span
        table.ledger.finish(span, admission, finished)
        rows = admission.rows[finished]
        answers = Answers(job.request, job.outputs, job.output_start, job.position, slots, rows)
        table.replies.put(span, answers, job.reserved_bytes[finished])
        self._queue.done(job, finished)
        table.touch(slots)
        table.settle(slots)
        self._observer.steps("executed", len(finished))
        if job.num_of_kind[RowKind.VERIFY]:
            is_verify = job.kind[finished] == RowKind.VERIFY
            self._observer.drafts(int(job.length[finished][is_verify].sum()))
