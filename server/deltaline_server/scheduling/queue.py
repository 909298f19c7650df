"""The job queue: what waits or runs on each span, within its bounds, and how rows enter and leave it.

Knows jobs and cells (span, slot); not when batches run (scheduler.py) nor the order of what is ready (ready.py).
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.scheduling.observer import Observer
from deltaline_server.scheduling.pending import Job, Join, RowState
from deltaline_server.scheduling.ready import ReadyRows
from deltaline_server.scheduling.scheduled_rows import Piece
from deltaline_server.scheduling.step_index import Cells
from deltaline_server.step import StepRequest
from deltaline_server.tables.admission import Admission
from deltaline_server.tables.earlier_replies import is_streamed
from deltaline_server.tables.kept_replies import Fingerprint, KeptReply
from deltaline_server.tables.sequences import SequenceTable


@dataclass(frozen=True)
class Limits:
    """Bounds of the queue, and of a batch: tokens of its long rows, and rows of either kind.

    A row is short when it has at most max_short tokens left.
    """

    queue_rows: int
    queue_bytes: int
    chunk_tokens: int
    max_short: int
    short_rows: int
    long_rows: int


@dataclass(frozen=True)
class Load:
    """How full the queue and the kept replies are."""

    queued_rows: int
    queued_rows_limit: int
    queued_bytes: int
    queued_bytes_limit: int
    reply_bytes: int
    reply_bytes_limit: int


class JobQueue:
    """Unfinished jobs by span, the admitted rows of each cell in the order of their steps, and what may run.

    A row may run when every token of the step before it was given to the engine: the engine computes in order. Rows
    count until they are done or refused, joined ones until their job is finished; a job's bytes count until its last
    row has left.
    """

    def __init__(self, table: SequenceTable, limits: Limits, observer: Observer) -> None:
        self._table, self._limits, self._observer = table, limits, observer
        num_spans = table.ledger.num_spans
        self._jobs: list[dict[int, Job]] = [{} for _ in range(num_spans)]
        self._cells = [Cells(table.num_slots, table.ledger.max_in_flight) for _ in range(num_spans)]
        sizes = limits.max_short, limits.chunk_tokens, limits.short_rows, limits.long_rows
        self.ready = [ReadyRows(*sizes) for _ in range(num_spans)]
        self._deadlines: list[tuple[float, int, int]] = []
        self._ended: list[Job] = []
        self._num_rows = self._num_bytes = 0
        self._last_span = num_spans - 1
        self._idle = asyncio.Event()
        self._idle.set()

    def load(self) -> Load:
        limits, replies = self._limits, self._table.replies
        return Load(
            self._num_rows,
            limits.queue_rows,
            self._num_bytes,
            limits.queue_bytes,
            replies.used_bytes + replies.earlier.used_bytes,
            replies.limit_bytes,
        )

    async def empty(self) -> None:
        """Return once nothing waits or runs."""
        await self._idle.wait()

    def ready_spans(self) -> list[int]:
        """Spans with rows that may run: the highest priority first, among equals the one served longest ago."""
        found = [(priority, span) for span, ready in enumerate(self.ready) if (priority := ready.priority) is not None]
        if len(found) < 2:
            return [span for _, span in found]
        after, count = self._last_span + 1, len(self.ready)
        return [span for _, span in sorted(found, key=lambda entry: (-entry[0], (entry[1] - after) % count))]

    def served(self, span: int) -> None:
        """A batch of this span runs."""
        self._last_span = span

    # -- coming ----------------------------------------------------------------------------------------------------

    def find_repeated(self, request: StepRequest, row: int, slot: int) -> KeptReply | Join | Refusal:
        """A step that is done or in flight came again: its kept reply, the job to join, or why neither."""
        ledger, span = self._table.ledger, request.form.span
        fingerprint = Fingerprint.of(request, row)
        step = int(request.step[row])
        if step == ledger.done.step[span, slot]:
            reply = self._table.replies.get(span, slot)
            if reply is None:
                return ledger.refusal(Reason.STEP_STALE, span, slot)
            if reply.fingerprint == fingerprint:
                return reply
        elif ledger.done.step[span, slot] < step <= ledger.tail.step[span, slot]:
            job, index = self._entry(span, slot, step)
            source_row = int(job.admission.rows[index])
            if Fingerprint.of(job.request, source_row) == fingerprint:
                return Join(row, job, source_row)
        return ledger.refusal(Reason.STEP_CONFLICT, span, slot)

    def find_earlier(self, request: StepRequest, row: int, slot: int) -> KeptReply | None:
        """A step before the last one done came again: its reply, if it was a part of a streamed prefill."""
        if not is_streamed(request):
            return None
        fingerprint = Fingerprint.of(request, row)
        return self._table.replies.get_earlier(request.form.span, slot, int(request.step[row]), fingerprint)

    def reserve(self, request: StepRequest, admission: Admission, num_joins: int) -> NDArray[np.int64]:
        """Check the bounds and set aside the bytes of the admitted rows' kept replies; int64 [rows].

        Raises RequestError QUEUE_FULL or REPLY_BYTES_EXHAUSTED.
        """
        limits = self._limits
        num_rows = len(admission.rows) + num_joins
        if num_rows and self._num_rows + num_rows > limits.queue_rows:
            raise RequestError(
                Reason.QUEUE_FULL,
                f"{self._num_rows} of {limits.queue_rows} rows wait, {num_rows} more do not fit",
                retry_after_s=0.02,
            )
        if num_rows and self._num_bytes + request.hidden.nbytes > limits.queue_bytes:
            raise RequestError(
                Reason.QUEUE_FULL,
                f"{self._num_bytes} of {limits.queue_bytes} bytes wait, {request.hidden.nbytes} more do not fit",
                retry_after_s=0.02,
            )
        replies, form, rows, slots = self._table.replies, request.form, admission.rows, admission.slots
        if len(rows) == form.num_rows:
            reserved, total = form.kept_bytes, form.total_kept_bytes
        else:
            reserved = form.kept_bytes[rows]
            total = int(reserved.sum())
        if not admission.is_idle:
            ledger = self._table.ledger
            slots = slots[ledger.tail.step[form.span, slots] == ledger.done.step[form.span, slots]]
        replies.reserve(total, form.span, slots)
        return reserved

    def add(self, job: Job) -> None:
        """Queue a job whose rows were reserved and taken by the ledger."""
        admission, span = job.admission, job.span
        if len(admission.rows):
            job.adapters = self._table.bindings.of_rows(admission.slots)
            index = self._cells[span].add(admission.slots, admission.step, job.number)
            if len(index):
                self.ready[span].add(job, index)
        for join in job.joins:
            join.source.joiners.append(job)
        self._num_rows += len(admission.rows) + len(job.joins)
        self._num_bytes += job.request.hidden.nbytes
        self._jobs[span][job.number] = job
        self._idle.clear()
        if job.request.deadline_s is not None:
            self._watch_deadline(job)

    # -- running ---------------------------------------------------------------------------------------------------

    def take(self, piece: Piece) -> None:
        """The engine was given a piece: the rows behind those that it ends may run."""
        job, index = piece.job, piece.index
        job.cursor[index] += piece.lengths
        span = job.span
        cells = self._cells[span]
        cells.in_flight[piece.slots] += 1
        if piece.ends:
            job.state[index] = RowState.RUNNING
            for number, behind in cells.given(piece.slots, job.admission.step[index]):
                self.ready[span].add(self._jobs[span][number], behind)

    def returned(self, piece: Piece) -> None:
        """A piece came back from the engine."""
        self._cells[piece.job.span].in_flight[piece.slots] -= 1

    def done(self, job: Job, index: NDArray[np.int64]) -> None:
        """Rows (positions in the job's admission) are done; they were the first of their cells."""
        job.state[index] = RowState.DONE
        job.num_unfinished -= len(index)
        self._num_rows -= len(index)
        if not job.num_unfinished:
            self._ended.append(job)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def refuse(self, job: Job, index: int, refusal: Refusal) -> None:
        """Drop an admitted row; the steps behind it on its cell are refused untouched. None of them is in flight."""
        span, slot, first = job.span, int(job.admission.slots[index]), int(job.admission.step[index])
        ledger = self._table.ledger
        behind = ledger.refusal(Reason.PREDECESSOR_REFUSED, span, slot)
        for step in range(first, int(ledger.tail.step[span, slot]) + 1):
            dropped, at = self._entry(span, slot, step)
            reason = behind if step > first else refusal
            self._table.replies.cancel(int(dropped.reserved_bytes[at]))
            if dropped.cursor[at] < dropped.length[at]:
                self._cells[span].not_given[slot] -= 1
            dropped.refuse(at, reason)
            self._num_rows -= 1
            self._observer.refused(reason.reason, 1)
            if not dropped.num_unfinished:
                self._ended.append(dropped)
        ledger.fall_back(span, slot)
        if first > ledger.done.step[span, slot] + 1:  # the tail is the last step that is still in flight
            last, at = self._entry(span, slot, first - 1)
            ledger.take(span, last.admission, np.array([at]))
        self._table.settle(np.array([slot]))

    def poison(self, slot: int) -> None:
        """A slot's state can't be trusted: refuse its rows, on spans where some are in flight once they are back."""
        ledger = self._table.ledger
        self._table.poison(slot)
        for span, cells in enumerate(self._cells):
            steps = range(int(ledger.done.step[span, slot]) + 1, int(ledger.tail.step[span, slot]) + 1)
            if cells.in_flight[slot]:
                for step in steps:
                    job, index = self._entry(span, slot, step)
                    job.state[index], job.is_marred = RowState.DOOMED, True
            elif steps:
                job, index = self._entry(span, slot, steps[0])
                self.refuse(job, index, ledger.refusal(Reason.STATE_POISONED, span, slot))

    def refuse_all(self, reason: Reason) -> None:
        """Refuse every row of which no token was taken; the others go on."""
        for span, jobs in enumerate(self._jobs):
            for job in list(jobs.values()):
                self._refuse_not_begun(job, span, reason)

    def drop_overdue(self, now_s: float) -> None:
        """Refuse rows whose queue deadline passed before their first chunk, and what waits behind them."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number, span = heapq.heappop(self._deadlines)
            if number in self._jobs[span]:
                self._refuse_not_begun(self._jobs[span][number], span, Reason.QUEUE_DEADLINE)

    def finish(self) -> None:
        """Complete finished jobs, a join's source before its joiner."""
        while self._ended:
            ended, self._ended = self._ended, []
            for job in ended:
                jobs = self._jobs[job.span]
                if job.number in jobs and job.can_finish:
                    job.finish()
                    del jobs[job.number]
                    self._num_rows -= len(job.joins)
                    self._num_bytes -= job.request.hidden.nbytes
                    self._ended += job.joiners
        if not any(self._jobs):
            self._idle.set()

    def _refuse_not_begun(self, job: Job, span: int, reason: Reason) -> None:
        for index in job.not_begun().tolist():
            if job.state[index] == RowState.WAITING:  # not dropped meanwhile with the one before it
                slot = int(job.admission.slots[index])
                self.refuse(job, index, self._table.ledger.refusal(reason, span, slot))

    def _watch_deadline(self, job: Job) -> None:
        """Remember a job's deadline; those of finished jobs are forgotten once they are the most."""
        span, deadline_s = job.span, job.request.deadline_s
        assert deadline_s is not None
        heapq.heappush(self._deadlines, (deadline_s, job.number, span))
        if len(self._deadlines) > 64 + 2 * sum(map(len, self._jobs)):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._jobs[entry[2]]]
            heapq.heapify(self._deadlines)

    def _entry(self, span: int, slot: int, step: int) -> tuple[Job, int]:
        """The job and the position in its admission of a step in flight."""
        number, index = self._cells[span].entry(slot, step)
        return self._jobs[span][number], index
