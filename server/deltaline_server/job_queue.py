"""The job queue: what waits or runs on each span, within its bounds, and how rows leave it.

Knows jobs and cells (span, slot); not when batches run (scheduler.py) nor what is in them (batch.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltaline_server.earlier_replies import is_streamed
from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.job import Job, Join
from deltaline_server.observer import Observer
from deltaline_server.replies import Fingerprint, KeptReply, fingerprint_bytes
from deltaline_server.sequences import SequenceTable
from deltaline_server.step import StepRequest


@dataclass(frozen=True)
class Limits:
    """Bounds of the queue and of a batch. A row is short when it has at most max_short tokens left."""

    queue_rows: int
    queue_bytes: int
    chunk_tokens: int
    max_short: int


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
    """Unfinished jobs by span, and the admitted rows of each cell in the order of their steps.

    Rows count until they are done or refused, joined ones until their job is finished; a job's bytes count until its
    last row has left.
    """

    def __init__(self, table: SequenceTable, limits: Limits, observer: Observer) -> None:
        self._table, self._limits, self._observer = table, limits, observer
        num_spans = table.ledger.num_spans
        self._jobs: list[dict[int, Job]] = [{} for _ in range(num_spans)]
        self._cells: list[dict[int, list[tuple[Job, int]]]] = [{} for _ in range(num_spans)]
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

    @property
    def num_jobs(self) -> int:
        return sum(len(jobs) for jobs in self._jobs)

    async def empty(self) -> None:
        """Return once nothing waits or runs."""
        await self._idle.wait()

    def jobs(self, span: int) -> list[Job]:
        """Unfinished jobs of a span in the order in which they run."""
        return sorted(self._jobs[span].values(), key=lambda job: job.order)

    def spans(self) -> list[int]:
        """Spans with unfinished jobs: the highest priority first, among equals the one that was served longest ago."""
        busy = [span for span, jobs in enumerate(self._jobs) if jobs]
        after, count = self._last_span + 1, len(self._jobs)
        return sorted(
            busy,
            key=lambda span: (
                -max(job.request.priority for job in self._jobs[span].values()),
                (span - after) % count,
            ),
        )

    def served(self, span: int) -> None:
        """A batch of this span runs."""
        self._last_span = span

    # -- coming ----------------------------------------------------------------------------------------------------

    def find_repeated(self, request: StepRequest, row: int, slot: int) -> KeptReply | Join | Refusal:
        """A step that is done or in flight came again: its kept reply, the job to join, or why neither."""
        ledger = self._table.ledger
        fingerprint = Fingerprint.of(request, row)
        step = int(request.step[row])
        if step == ledger.done.step[request.span, slot]:
            reply = self._table.replies.get(request.span, slot)
            if reply is None:
                return ledger.refusal(Reason.STEP_STALE, request.span, slot)
            if reply.fingerprint == fingerprint:
                return reply
        for job, index in self._cells[request.span].get(slot, ()):
            source_row = int(job.admission.rows[index])
            if job.admission.step[index] == step and Fingerprint.of(job.request, source_row) == fingerprint:
                return Join(row, job, source_row)
        return ledger.refusal(Reason.STEP_CONFLICT, request.span, slot)

    def find_earlier(self, request: StepRequest, row: int, slot: int) -> KeptReply | None:
        """A step before the last one done came again: its reply, if it was a part of a streamed prefill."""
        if not is_streamed(request):
            return None
        fingerprint = Fingerprint.of(request, row)
        return self._table.replies.get_earlier(request.span, slot, int(request.step[row]), fingerprint)

    def reserve(
        self, request: StepRequest, rows: NDArray[np.int64], slots: NDArray[np.int64], num_joins: int
    ) -> NDArray[np.int64]:
        """Check the bounds and set aside the bytes of the new rows' kept replies; int64 [len(rows)].

        rows: the request's new rows, slots: theirs. Raises RequestError QUEUE_FULL or REPLY_BYTES_EXHAUSTED.
        """
        limits = self._limits
        num_rows = len(rows) + num_joins
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
        outputs = request.output_counts[rows] * request.token_bytes
        reserved = outputs + fingerprint_bytes(request.lengths[rows] * request.token_bytes)
        ledger, span = self._table.ledger, request.span
        is_idle = ledger.tail.step[span, slots] == ledger.done.step[span, slots]
        self._table.replies.reserve(int(reserved.sum()), span, slots[is_idle])
        return reserved

    def add(self, job: Job) -> None:
        """Queue a job whose rows were reserved."""
        cells = self._cells[job.request.span]
        for index, slot in enumerate(job.admission.slots.tolist()):
            cells.setdefault(slot, []).append((job, index))
        self._num_rows += len(job.admission.rows) + len(job.joins)
        self._num_bytes += job.request.hidden.nbytes
        self._jobs[job.request.span][job.number] = job
        self._idle.clear()

    # -- leaving ---------------------------------------------------------------------------------------------------

    def done(self, job: Job, index: NDArray[np.int64]) -> None:
        """Rows (positions in the job's admission) are done; they were the first of their cells."""
        cells = self._cells[job.request.span]
        for slot in job.admission.slots[index].tolist():
            if len(cells[slot]) == 1:
                del cells[slot]
            else:
                cells[slot].pop(0)
        self._num_rows -= len(index)

    def refuse(self, job: Job, index: int, refusal: Refusal) -> None:
        """An admitted row that is not running is dropped; the steps behind it on its cell are refused untouched."""
        span, slot = job.request.span, int(job.admission.slots[index])
        ledger, cells = self._table.ledger, self._cells[span]
        cell = cells[slot]
        place = next(i for i, entry in enumerate(cell) if entry[0] is job and entry[1] == index)
        behind = ledger.refusal(Reason.PREDECESSOR_REFUSED, span, slot)
        for i, (dropped, at) in enumerate(cell[place:]):
            reason = behind if i else refusal
            self._table.replies.cancel(int(dropped.reserved_bytes[at]))
            dropped.refuse(at, reason)
            self._num_rows -= 1
            self._observer.refused(reason.reason, 1)
        del cell[place:]
        ledger.fall_back(span, slot)
        if cell:  # the tail is the last step that is still in flight
            last, at = cell[-1]
            ledger.take(span, last.admission, np.array([at]))
        else:
            del cells[slot]
        self._table.settle(np.array([slot]))

    def refuse_slot(self, slot: int, reason: Reason) -> None:
        """Refuse whatever waits for a slot, on every span. No row of the slot is running."""
        for span, cells in enumerate(self._cells):
            if slot in cells:
                job, index = cells[slot][0]
                self.refuse(job, index, self._table.ledger.refusal(reason, span, slot))

    def refuse_all(self, reason: Reason) -> None:
        """Refuse every row that waits; those that run go on."""
        for span, cells in enumerate(self._cells):
            for slot, cell in list(cells.items()):
                waiting = [(job, index) for job, index in cell if job.is_waiting(index)]
                if waiting:
                    job, index = waiting[0]
                    self.refuse(job, index, self._table.ledger.refusal(reason, span, slot))

    def drop_overdue(self, now: float) -> None:
        """Refuse rows whose queue deadline passed before their first chunk, and what waits behind them."""
        for span, jobs in enumerate(self._jobs):
            for job in list(jobs.values()):
                deadline = job.request.deadline_s
                if deadline is not None and deadline <= now:
                    for index in job.not_begun().tolist():
                        if job.is_waiting(index):  # not dropped meanwhile with the one before it
                            slot = int(job.admission.slots[index])
                            self.refuse(job, index, self._table.ledger.refusal(Reason.QUEUE_DEADLINE, span, slot))

    def finish(self) -> None:
        """Complete finished jobs, oldest first, so that a join's source is complete before its joiner."""
        for jobs in self._jobs:
            for job in [job for job in jobs.values() if job.num_unfinished == 0]:
                if job.can_finish:
                    job.finish()
                    del jobs[job.number]
                    self._num_rows -= len(job.joins)
                    self._num_bytes -= job.request.hidden.nbytes
        if not any(self._jobs):
            self._idle.set()
