"""The scheduler: takes step requests, merges their rows into batches for the engine, and completes them.

Knows jobs, cells and limits; not protobuf, gRPC or torch. Everything here runs on one event loop; the engine calls
back from its own thread and is brought over. One batch runs at a time: whatever waits when the device is free forms
the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltaline_server.batch import Piece, choose_pieces, lay_out
from deltaline_server.errors import Reason
from deltaline_server.job import Job, RowState
from deltaline_server.job_queue import JobQueue, Limits, Load
from deltaline_server.observer import BatchTiming, Observer
from deltaline_server.replies import Fingerprint, KeptReply
from deltaline_server.sequences import SequenceTable
from deltaline_server.step import BatchResult, RowKind, StepBatch, StepRequest, StepResult
from deltaline_server.verdict import judge


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
        self._running = self._pump_is_due = False

    def load(self) -> Load:
        return self._queue.load()

    async def drained(self) -> None:
        """Return once nothing is queued or running."""
        await self._queue.empty()

    # -- taking requests -------------------------------------------------------------------------------------------

    def submit(self, request: StepRequest) -> asyncio.Future[StepResult]:
        """Judge every row, queue those that are new, and return the future of the whole result.

        The future is completed whatever becomes of its caller. Raises RequestError (QUEUE_FULL, REPLY_BYTES_EXHAUSTED)
        when the request can't be taken; then no row was touched.
        """
        verdict = judge(request, self._table, self._queue)
        reserved_bytes = self._queue.reserve(request, verdict.admission.rows)
        self._table.ledger.take(request.span, verdict.admission)
        self._table.touch(verdict.live_slots)
        job = Job(request, verdict.admission, reserved_bytes, self._num_jobs, self._clock())
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
        if job.is_finished:
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
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        if self._running:
            return
        for span in self._queue.spans():
            self._queue.drop_overdue(span, self._clock())
            pieces = self._start(span)
            if pieces:
                self._run(span, pieces)
                break
        self._queue.finish()

    def _run(self, span: int, pieces: list[Piece]) -> None:
        batch = lay_out(pieces, self._table, max_short=self._limits.max_short)
        loop = asyncio.get_running_loop()

        def bring_over(result: BatchResult) -> None:
            loop.call_soon_threadsafe(self._complete, span, pieces, batch, result)

        self._running = True
        self._engine.submit(batch, bring_over)

    def _start(self, span: int) -> list[Piece]:
        """Choose rows and mark them running; their commits are fixed from here on."""
        limits, jobs = self._limits, self._queue.jobs(span)
        chosen = choose_pieces(jobs, self._table, max_short=limits.max_short, chunk_tokens=limits.chunk_tokens)
        pieces = []
        for piece in chosen:
            job = piece.job
            first = piece.index[job.cursor[piece.index] == 0]
            conflicts = self._table.ledger.begin(span, job.admission, first)
            for i, refusal in conflicts.items():
                self._queue.refuse(job, i, refusal)
            if conflicts:
                runs = ~np.isin(piece.index, list(conflicts))
                piece = Piece(job, piece.index[runs], piece.lengths[runs])
            if len(piece.index):
                job.state[piece.index] = RowState.RUNNING
                pieces.append(piece)
                self._observer.accepted(int(job.admission.num_replayed[first].sum()))
        now = self._clock()
        for piece in pieces:
            if not piece.job.timing.batch_rows:
                piece.job.timing.queue_s = now - piece.job.arrival_s
        return pieces

    def _complete(self, span: int, pieces: list[Piece], batch: StepBatch, result: BatchResult) -> None:
        """A batch is done: move cursors, keep replies, start the next batch, complete the jobs that are finished."""
        self._running = False
        num_rows, num_tokens = len(result.finite), len(batch.hidden)
        self._observe(pieces, num_tokens, result)
        row = output = 0
        for piece in pieces:
            job, index = piece.job, piece.index
            timing = job.timing
            timing.copy_in_s += result.copy_in_s
            timing.compute_s += result.compute_s
            timing.copy_out_s += result.copy_out_s
            timing.batch_rows, timing.batch_tokens = num_rows, num_tokens
            if not result.failed:
                places = job.output_places(index, piece.lengths)
                count = places.stop - places.start if isinstance(places, slice) else len(places)
                job.put_outputs(places, result.hidden[output : output + count])
                output += count
            self._settle_piece(span, piece, result.finite[row : row + len(index)])
            row += len(index)
        self._pump()

    def _settle_piece(self, span: int, piece: Piece, sound: NDArray[np.bool_]) -> None:
        table, job = self._table, piece.job
        job.state[piece.index] = RowState.WAITING
        ends = piece.ends_row & sound
        ran, finished = piece.index[sound], piece.index[ends]
        job.cursor[piece.index] += piece.lengths
        table.read_line[span, job.admission.slots[ran]] = table.write_line[job.admission.slots[ran]]
        if len(finished):
            slots = job.admission.slots[finished]
            table.ledger.finish(span, job.admission, finished)
            verified = slots[job.kind[finished] == RowKind.VERIFY]
            table.draft_half[span, verified] ^= 1
            self._keep_replies(span, job, finished)
            job.state[finished] = RowState.DONE
            job.num_unfinished -= len(finished)
            self._queue.leave(job, len(finished))
            self._observer.steps("executed", len(finished))
            self._observer.drafts(int(job.length[finished][job.kind[finished] == RowKind.VERIFY].sum()))
            table.settle(slots)
        for i in piece.index[~sound].tolist():
            slot = int(job.admission.slots[i])
            table.poison(slot)
            self._queue.refuse(job, i, table.ledger.refusal(Reason.STATE_POISONED, span, slot))
            self._queue.refuse_waiting(slot, Reason.STATE_POISONED)

    def _keep_replies(self, span: int, job: Job, finished: NDArray[np.int64]) -> None:
        rows = job.admission.rows[finished].tolist()
        replies = [
            KeptReply(Fingerprint.of(job.request, row), job.output_of(row).copy(), int(job.position[row]))
            for row in rows
        ]
        self._table.replies.put(span, job.admission.slots[finished].tolist(), replies, job.reserved_bytes[finished])

    def _observe(self, pieces: list[Piece], num_tokens: int, result: BatchResult) -> None:
        kinds = np.concatenate([piece.job.kind[piece.index] for piece in pieces])
        queue_s = np.concatenate(
            [np.where(piece.job.cursor[piece.index] == 0, piece.job.timing.queue_s, np.nan) for piece in pieces]
        )
        timing = BatchTiming(queue_s, result.copy_in_s, result.compute_s, result.copy_out_s)
        self._observer.batch_done(kinds, num_tokens, timing)
