"""The job queue: what waits or runs on each span, within its bounds, and how rows leave it.

Knows jobs and cells; not when batches run (scheduler.py) nor what is in them (batch.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.job import Job, Join, RowState
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
    """Unfinished jobs by span. Bytes of a job's request count until all its rows have left."""

    def __init__(self, table: SequenceTable, limits: Limits, observer: Observer) -> None:
        self._table, self._limits, self._observer = table, limits, observer
        self._jobs: list[list[Job]] = [[] for _ in range(table.ledger.num_spans)]
        self._num_rows = self._num_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def load(self) -> Load:
        limits, replies = self._limits, self._table.replies
        return Load(
            self._num_rows,
            limits.queue_rows,
            self._num_bytes,
            limits.queue_bytes,
            replies.used_bytes,
            replies.limit_bytes,
        )

    async def empty(self) -> None:
        """Return once nothing waits or runs."""
        await self._idle.wait()

    def jobs(self, span: int) -> list[Job]:
        """Unfinished jobs of a span in the order in which they run."""
        return sorted(self._jobs[span], key=lambda job: job.order)

    def spans(self) -> list[int]:
        """Spans with unfinished jobs; the one whose first job comes first is first."""
        busy = [span for span, jobs in enumerate(self._jobs) if jobs]
        return sorted(busy, key=lambda span: min(job.order for job in self._jobs[span]))

    def reserve(self, request: StepRequest, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Check the queue's bounds and set aside the bytes of the rows' kept replies; int64 [len(rows)]."""
        limits = self._limits
        if not len(rows):
            return np.zeros(0, dtype=np.int64)
        if self._num_rows + len(rows) > limits.queue_rows:
            raise RequestError(
                Reason.QUEUE_FULL,
                f"{self._num_rows} of {limits.queue_rows} rows wait, {len(rows)} more do not fit",
                retry_after_s=0.02,
            )
        if self._num_bytes + request.hidden.nbytes > limits.queue_bytes:
            raise RequestError(
                Reason.QUEUE_FULL,
                f"{self._num_bytes} of {limits.queue_bytes} bytes wait, {request.hidden.nbytes} more do not fit",
                retry_after_s=0.02,
            )
        outputs = request.output_counts()[rows] * request.token_bytes
        reserved = outputs + fingerprint_bytes(request.lengths[rows] * request.token_bytes)
        self._table.replies.reserve(int(reserved.sum()))
        return reserved

    def add(self, job: Job) -> None:
        """Queue a job whose rows were reserved."""
        self._num_rows += len(job.admission.rows)
        self._num_bytes += job.request.hidden.nbytes if len(job.admission.rows) else 0
        self._jobs[job.request.span].append(job)
        self._idle.clear()

    def find_repeated(self, request: StepRequest, row: int, slot: int) -> KeptReply | Join | Refusal:
        """A step that is done or in flight came again: its kept reply, the job to join, or why neither."""
        fingerprint = Fingerprint.of(request, row)
        step = int(request.step[row])
        if step == self._table.ledger.done.step[request.span, slot]:
            reply = self._table.replies.get(request.span, slot)
            if reply is not None and reply.fingerprint == fingerprint:
                return reply
        for job in self._jobs[request.span]:
            for index in np.flatnonzero((job.admission.slots == slot) & (job.admission.step == step)).tolist():
                source_row = int(job.admission.rows[index])
                is_live = job.state[index] in (RowState.WAITING, RowState.RUNNING)
                if is_live and Fingerprint.of(job.request, source_row) == fingerprint:
                    return Join(row, job, source_row)
        return self._table.ledger.refusal(Reason.STEP_CONFLICT, request.span, slot)

    def drop_overdue(self, span: int, now: float) -> None:
        """Refuse rows whose queue deadline passed before their first chunk, and what waits behind them."""
        for job in self._jobs[span]:
            deadline = job.request.deadline_s
            if deadline is not None and deadline <= now:
                for i in np.flatnonzero((job.state == RowState.WAITING) & (job.cursor == 0)).tolist():
                    if job.state[i] == RowState.WAITING:
                        slot = int(job.admission.slots[i])
                        self.refuse(job, i, self._table.ledger.refusal(Reason.QUEUE_DEADLINE, span, slot))

    def refuse(self, job: Job, index: int, refusal: Refusal) -> None:
        """An admitted row is dropped; the steps behind it on its cell are refused untouched."""
        span, slot = job.request.span, int(job.admission.slots[index])
        step = int(job.admission.step[index])
        self._drop(job, index, refusal)
        for other in self._jobs[span]:
            behind = (other.admission.slots == slot) & (other.admission.step > step) & (other.state == RowState.WAITING)
            for i in np.flatnonzero(behind).tolist():
                self._drop(other, i, self._table.ledger.refusal(Reason.PREDECESSOR_REFUSED, span, slot))
        self._rewind(span, slot)
        self._table.settle(np.array([slot]))

    def _rewind(self, span: int, slot: int) -> None:
        """The end of a cell's queue was dropped: its tail is the last step that still waits, or what is done."""
        ledger = self._table.ledger
        ledger.fall_back(span, slot)
        for job in self._jobs[span]:
            waits = (job.admission.slots == slot) & (job.state == RowState.WAITING)
            for i in np.flatnonzero(waits & (job.admission.step > ledger.tail.step[span, slot])):
                ledger.take(span, job.admission, np.array([i]))

    def refuse_waiting(self, slot: int, reason: Reason) -> None:
        """Refuse whatever waits for a slot, on every span. No row of the slot is running."""
        for span, jobs in enumerate(self._jobs):
            for job in jobs:
                for i in np.flatnonzero((job.admission.slots == slot) & (job.state == RowState.WAITING)).tolist():
                    if job.state[i] == RowState.WAITING:
                        self.refuse(job, i, self._table.ledger.refusal(reason, span, slot))

    def _drop(self, job: Job, index: int, refusal: Refusal) -> None:
        self._table.replies.cancel(int(job.reserved_bytes[index]))
        job.refuse(index, refusal)
        self.leave(job, 1)
        self._observer.refused(refusal.reason, 1)

    def leave(self, job: Job, count: int) -> None:
        """Rows of a job are done or dropped."""
        self._num_rows -= count
        if job.num_unfinished == 0:
            self._num_bytes -= job.request.hidden.nbytes

    def finish(self) -> None:
        """Complete finished jobs, oldest first, so that a join's source is complete before its joiner."""
        for jobs in self._jobs:
            for job in [job for job in jobs if job.num_unfinished == 0]:
                if job.is_finished:
                    job.finish()
                    jobs.remove(job)
        if not any(self._jobs):
            self._idle.set()
