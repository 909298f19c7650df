"""The scheduler: takes step requests, merges their rows into batches for the engine, and completes them.

Knows jobs, cells and limits; not protobuf, gRPC or torch. Everything here runs on one event loop; the engine calls
back from its own thread and is brought over. One batch runs at a time: whatever waits when the device is free forms
the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deltaline_server.batch import Piece, Run, choose_pieces, lay_out
from deltaline_server.earlier_replies import PrefillAnswer, is_streamed
from deltaline_server.errors import Reason, RequestError
from deltaline_server.job import Job, RowState
from deltaline_server.job_queue import JobQueue, Limits, Load
from deltaline_server.observer import Observer
from deltaline_server.replies import Answers
from deltaline_server.sequences import SequenceTable
from deltaline_server.step import BatchResult, RowKind, StepBatch, StepRequest, StepResult
from deltaline_server.verdict import judge

_log = logging.getLogger(__name__)


class BatchEngine(Protocol):
    """What the scheduler needs of an engine."""

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None]) -> None:
        """Compute a batch, in the order of submission; `on_done` is called on the engine's thread."""


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
        self._table, self._engine, self._limits = table, engine, limits
        self._observer, self._clock = observer, clock
        self._queue = JobQueue(table, limits, observer)
        self._num_jobs = 0
        self._running = self._pump_is_due = self._is_stopped = False
        self.has_failed = False
        """Whether the scheduler itself broke: it runs nothing more, and the process should end."""

    def load(self) -> Load:
        return self._queue.load()

    async def drained(self) -> None:
        """Return once nothing is queued or running."""
        await self._queue.empty()

    def stop(self) -> None:
        """Refuse what waits and what comes, UNAVAILABLE STOPPING; what runs is finished. Idempotent."""
        self._is_stopped = True
        self._queue.refuse_all(Reason.STOPPING)
        self._queue.finish()

    # -- taking requests -------------------------------------------------------------------------------------------

    def submit(self, request: StepRequest) -> asyncio.Future[StepResult]:
        """Judge every row, queue those that are new, and return the future of the whole result.

        Cancelling the future cancels nothing else: the work goes on, and its reply is kept. Raises RequestError
        (QUEUE_FULL, REPLY_BYTES_EXHAUSTED, STOPPING) when the request can't be taken; then no row was touched.
        """
        if self._is_stopped:
            raise RequestError(Reason.STOPPING, "the server is stopping")
        verdict = judge(request, self._table, self._queue)
        admission = verdict.admission
        reserved_bytes = self._queue.reserve(request, admission.rows, admission.slots, len(verdict.joins))
        self._table.ledger.take(request.span, admission)
        self._table.touch(verdict.live_slots)
        job = Job(request, admission, reserved_bytes, self._num_jobs, self._clock())
        self._num_jobs += 1
        job.lay_out_outputs(verdict.answered_rows)
        job.joins = verdict.joins
        for row, refusal in verdict.refusals.items():
            job.set_refusal(row, refusal)
            self._observer.refused(refusal.reason, 1)
        for row, reply in verdict.kept.items():
            job.replay(row, reply)
        self._observer.steps("replayed", len(verdict.kept))
        self._observer.steps("joined", len(verdict.joins))
        if job.can_finish:
            job.finish()
        else:
            self._queue.add(job)
            self._pump_soon()
        return job.future

    # -- running batches -------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Form a batch after the callbacks that are ready now, so that requests that came together run together."""
        if not self._running and not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._guarded, self._pump)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do a part of the scheduler's work; a bug in it ends the scheduler instead of leaving callers to wait."""
        try:
            work(*arguments)
        except Exception:
            _log.exception("the scheduler failed; it runs nothing more")
            self.has_failed = True

    def _pump(self) -> None:
        self._pump_is_due = False
        if self._running:
            return
        self._queue.drop_overdue(self._clock())
        for span in self._queue.spans():
            pieces = self._start(span)
            if pieces:
                self._run(span, pieces)
                break
        self._queue.finish()

    def _start(self, span: int) -> list[Piece]:
        """Choose rows and mark them running; their commits are fixed from here on."""
        limits = self._limits
        while True:
            jobs = self._queue.jobs(span)
            chosen = choose_pieces(jobs, self._table, max_short=limits.max_short, chunk_tokens=limits.chunk_tokens)
            pieces = [piece for piece in map(self._begin, chosen) if len(piece.index)]
            if pieces or not chosen:
                return pieces

    def _begin(self, piece: Piece) -> Piece:
        """Fix the commits of the rows that begin with this piece; return it without those that conflict."""
        job, ledger = piece.job, self._table.ledger
        first = piece.index[job.cursor[piece.index] == 0]
        conflicts = ledger.begin(job.request.span, job.admission, first)
        if conflicts:
            for index, refusal in conflicts.items():
                self._queue.refuse(job, index, refusal)
            runs = ~np.isin(piece.index, list(conflicts))
            piece, first = Piece(job, piece.index[runs], piece.lengths[runs]), np.setdiff1d(first, list(conflicts))
        job.state[piece.index] = RowState.RUNNING
        self._observer.accepted(int(job.admission.num_replayed[first].sum()))
        return piece

    def _run(self, span: int, pieces: list[Piece]) -> None:
        batch = lay_out(pieces, self._table, max_short=self._limits.max_short)
        loop, now_s = asyncio.get_running_loop(), self._clock()
        run = Run(span, pieces, batch, now_s)

        def bring_over(result: BatchResult) -> None:
            loop.call_soon_threadsafe(self._guarded, self._complete, run, result)

        self._running = True
        self._queue.served(span)
        self._engine.submit(batch, bring_over)

    # -- completing batches ----------------------------------------------------------------------------------------

    def _complete(self, run: Run, result: BatchResult) -> None:
        """A batch is done: answer, settle the books, and start the next one.

        When nobody else waits, callers are answered first; until the books are settled the rows count as in flight.
        Else the device comes first.
        """
        run.take_outputs(result)
        if run.answers_all(result) and self._queue.num_jobs == len(run.pieces):
            for piece in run.pieces:
                piece.job.finish()
            asyncio.get_running_loop().call_soon(self._guarded, self._settle, run, result)
        else:
            self._settle(run, result)

    def _settle(self, run: Run, result: BatchResult) -> None:
        """Bring cursors, ledger, kept replies and leases up to a batch that is done, and start the next."""
        timing = run.timing(result)
        row = 0
        for piece in run.pieces:
            self._settle_piece(run.span, piece, result.finite[row : row + len(piece.index)])
            row += len(piece.index)
        self._running = False
        self._pump()
        self._observer.batch_done(run.kinds, run.batch.num_tokens, timing)

    def _settle_piece(self, span: int, piece: Piece, sound: NDArray[np.bool_]) -> None:
        table, job = self._table, piece.job
        job.state[piece.index] = RowState.WAITING
        ran, finished = piece.index[sound], piece.index[piece.ends_row & sound]
        job.cursor[piece.index] += piece.lengths
        ran_slots = job.admission.slots[ran]
        table.read_line[span, ran_slots] = table.write_line[ran_slots]
        if len(finished):
            slots = job.admission.slots[finished]
            is_verify = job.kind[finished] == RowKind.VERIFY
            table.ledger.finish(span, job.admission, finished)
            table.draft_half[span, slots[is_verify]] ^= 1
            self._keep_replies(span, job, finished)
            job.state[finished] = RowState.DONE
            job.num_unfinished -= len(finished)
            self._queue.done(job, finished)
            table.touch(slots)
            table.settle(slots)
            self._observer.steps("executed", len(finished))
            self._observer.drafts(int(job.length[finished][is_verify].sum()))
        for index in piece.index[~sound].tolist():
            slot = int(job.admission.slots[index])
            table.poison(slot)
            self._queue.refuse(job, index, table.ledger.refusal(Reason.STATE_POISONED, span, slot))
            self._queue.refuse_slot(slot, Reason.STATE_POISONED)

    def _keep_replies(self, span: int, job: Job, finished: NDArray[np.int64]) -> None:
        slots, rows = job.admission.slots[finished], job.admission.rows[finished]
        answers = Answers(job.request, job.outputs, job.output_start, job.position, slots, rows)
        self._table.replies.put(span, answers, job.reserved_bytes[finished])
        if is_streamed(job.request):
            answer = PrefillAnswer(int(job.request.step[0]), job.request, job.outputs, int(job.position[0]))
            self._table.replies.keep_earlier(span, int(slots[0]), answer)
        elif self._table.replies.earlier.used_bytes:
            for slot in slots.tolist():
                self._table.replies.keep_earlier(span, slot, None)
