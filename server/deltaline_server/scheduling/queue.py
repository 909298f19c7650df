"""The queue: what waits or runs on each span, within its bounds, and how rows enter and leave it."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.principal import Principal, check_share
from deltaline_server.scheduling.observer import Observer
from deltaline_server.scheduling.pending import Join, PendingStep, RowState
from deltaline_server.scheduling.ready import ReadyQueue
from deltaline_server.scheduling.scheduled_rows import ScheduledRows
from deltaline_server.scheduling.step_index import Places, StepIndex
from deltaline_server.scheduling.use import Use
from deltaline_server.step import Limits, StepRequest
from deltaline_server.tables.kept_replies import Fingerprint, KeptReply, is_streamed
from deltaline_server.tables.ledger import Admission, Slots
from deltaline_server.tables.sequence_adapters import NO_ADAPTER
from deltaline_server.tables.sequences import SequenceTable


@dataclass(frozen=True)
class Load:
    """How full the queue and the kept replies are."""

    queued_rows: int
    queued_rows_limit: int
    queued_bytes: int
    queued_bytes_limit: int
    reply_bytes: int
    reply_bytes_limit: int


class Queue:
    """Pending steps by span, the admitted rows of each (span, slot) in the order of their steps, and what may run.

    A row may run when every token of the step before it was given to the engine: the engine computes in order. All rows
    of a request count, as those that don't run are padding: each until it is done, the others until the request is
    finished, as its bytes do. deadlines: (when, number, span) of pending steps, a heap.
    """

    def __init__(self, table: SequenceTable, limits: Limits, observer: Observer, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds, of quotas."""
        self._table, self._limits, self._observer, self._clock = table, limits, observer, clock
        num_spans = table.ledger.num_spans
        self._pending: list[dict[int, PendingStep]] = [{} for _ in range(num_spans)]
        self._index = [StepIndex(table.num_slots, table.ledger.max_in_flight) for _ in range(num_spans)]
        self.places = Places(table, self._index, self._freed)
        """What is no step and has its place among them."""
        sizes = limits.max_draft_tokens, limits.chunk_tokens, limits.short_rows, limits.long_rows
        self.ready_spans: set[int] = set()
        """Spans with rows that may run."""
        self.ready = [ReadyQueue(span, self.ready_spans, *sizes) for span in range(num_spans)]
        self.deadlines: list[tuple[float, int, int]] = []
        self.ended: list[PendingStep] = []
        """Those whose last row has left; `finish` is to be called."""
        self._num_rows = self._num_bytes = self._num_added = 0
        self.use: defaultdict[int, Use] = defaultdict(Use)
        """What each principal has of that, by its number."""
        self.last_span = num_spans - 1
        """The span that was served last."""
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

    async def until_empty(self) -> None:
        """Return once nothing waits or runs."""
        await self._idle.wait()

    def spans_in_order(self) -> list[int]:
        """The spans that are ready: the one served longest ago first; before that, while one principal has all that
        waits, the highest priority."""
        if len(self.ready_spans) == 1:
            return list(self.ready_spans)
        if sum(use.rows > 0 for use in self.use.values()) > 1:
            after, count = self.last_span + 1, len(self.ready)
            return sorted(self.ready_spans, key=lambda span: (span - after) % count)
        after, count = self.last_span + 1, len(self.ready)
        return sorted(self.ready_spans, key=lambda span: (-self.ready[span].priority(), (span - after) % count))

    # -- coming ----------------------------------------------------------------------------------------------------

    def find_repeated(self, request: StepRequest, row: int, slot: int) -> KeptReply | Join | Refusal:
        """A step that is done or in flight came again: its kept reply, the row to join, or why neither."""
        ledger, span = self._table.ledger, request.form.span
        fingerprint = Fingerprint.of(request, row)
        step = int(request.step[row])
        if step == ledger.done.step[span, slot]:
            reply = self._table.replies.get(span, slot)
            if reply is None:
                return ledger.refusal(Reason.STEP_STALE, span, slot)
            if reply.fingerprint == fingerprint:
                return (self._ending(request, row, slot) if request.form.waypoints else None) or reply
        elif ledger.done.step[span, slot] < step <= ledger.tail.step[span, slot]:
            source, index = self._find(span, slot, step)
            source_row = int(source.admission.rows[index])
            if Fingerprint.of(source.request, source_row) == fingerprint:
                return Join(row, source, source_row)
        return ledger.refusal(Reason.STEP_CONFLICT, span, slot)

    def find_earlier(self, request: StepRequest, row: int, slot: int) -> KeptReply | None:
        """A step before the last one done came again: its reply, if it was a part of a streamed prefill."""
        if not is_streamed(request):
            return None
        fingerprint = Fingerprint.of(request, row)
        return self._table.replies.get_earlier(request.form.span, slot, int(request.step[row]), fingerprint)

    def _ending(self, request: StepRequest, row: int, slot: int) -> Join | None:
        """The last step that is done came again: it, where a state is yet to be left behind it."""
        number, index = self._index[request.form.span].entry(slot, int(request.step[row]))
        source = self._pending[request.form.span].get(number)
        source_row = -1 if source is None else int(source.admission.rows[index])
        return Join(row, source, source_row) if source is not None and source_row in source.ends else None

    def reserve(self, request: StepRequest, admission: Admission, num_joins: int) -> None:
        """Check the bounds and set aside the bytes of the admitted rows' kept replies.

        Raises RequestError QUEUE_FULL, QUOTA_EXCEEDED or REPLY_BYTES_EXHAUSTED.
        """
        limits, form, rows, slots = self._limits, request.form, admission.rows, admission.slots
        num_rows = form.num_rows if len(rows) or num_joins else 0
        num_bytes = request.hidden.nbytes
        for waiting, limit, more, unit in (
            (self._num_rows, limits.queue_rows, num_rows, "rows"),
            (self._num_bytes, limits.queue_bytes, num_bytes, "bytes"),
        ):
            if num_rows and waiting + more > limit:
                message = f"{waiting} of {limit} {unit} wait, {more} more do not fit"
                raise RequestError(Reason.QUEUE_FULL, message, retry_after_s=0.02)
        if request.principal.number and num_rows:
            use = self.use[request.principal.number]
            if not request.principal.is_alone:
                check_share(use.rows, num_rows, limits.queue_rows - self._num_rows, "rows that wait")
                check_share(use.num_bytes, num_bytes, limits.queue_bytes - self._num_bytes, "bytes that wait")
            use.check(request, rows, self._clock())
        is_whole = len(rows) == form.num_rows
        reserved_bytes = form.total_kept_bytes if is_whole else int(form.kept_bytes[rows].sum())
        if not admission.is_idle:
            ledger = self._table.ledger
            slots = slots[ledger.tail.step[form.span, slots] == ledger.done.step[form.span, slots]]
        if request.principal.number and reserved_bytes and not request.principal.is_alone:
            self._check_reply_share(request.principal, form.span, slots, reserved_bytes)
        self._table.replies.reserve(reserved_bytes, form.span, slots)

    def reserve_replies(self, principal: Principal, num_bytes: int) -> None:
        """Set bytes aside for replies that come from elsewhere. Raises RequestError REPLY_BYTES_EXHAUSTED."""
        nowhere = np.zeros(0, dtype=np.int64)
        if principal.number and num_bytes and not principal.is_alone:
            self._check_reply_share(principal, 0, nowhere, num_bytes)
        self._table.replies.reserve(num_bytes, 0, nowhere)

    def _check_reply_share(self, principal: Principal, span: int, slots: Slots, reserved_bytes: int) -> None:
        """Raise RequestError REPLY_BYTES_EXHAUSTED where replies to a principal would take more than they leave to
        others; slots: whose present replies are given up for them, which is nobody's loss."""
        replies = self._table.replies
        if 2 * (replies.used_bytes + reserved_bytes) <= replies.limit_bytes:
            return  # half is everybody's
        more_bytes = reserved_bytes - replies.num_bytes(span, slots)
        if more_bytes > 0:
            held_bytes = self.use[principal.number].reply_bytes + self._table.kept_bytes(principal)
            free_bytes = replies.limit_bytes - replies.used_bytes
            check_share(held_bytes, more_bytes, free_bytes, "bytes of replies", Reason.REPLY_BYTES_EXHAUSTED)

    def add(self, pending: PendingStep) -> None:
        """Queue a pending step whose rows were reserved and taken by the ledger."""
        admission, span = pending.admission, pending.span
        pending.number = self._num_added
        self._num_added += 1
        if len(admission.rows):
            adapters = self._table.adapters.of_rows(admission.slots)
            if adapters is not None and len(pending.padding):
                adapters = np.concatenate((adapters, np.full(len(pending.padding), NO_ADAPTER)))
            pending.adapters = adapters
            index = self._index[span].add(admission.slots, admission.after[0], pending.number)
            if len(index):
                self._may_run(pending, index)
        for join in pending.joins:
            join.source.joiners.append(pending)
        self._num_rows += pending.form.num_rows
        self._num_bytes += pending.request.hidden.nbytes
        pending.use = self.use[pending.request.principal.number]
        pending.use.take(pending.request, admission.rows)
        self._pending[span][pending.number] = pending
        self._idle.clear()
        if pending.request.deadline_s is not None:
            self._watch_deadline(pending, pending.request.deadline_s)

    # -- running ---------------------------------------------------------------------------------------------------

    def given(self, rows: ScheduledRows) -> None:
        """The engine was given these rows' tokens: where they are the last, the rows behind them may run."""
        pending, index = rows.pending, rows.index
        pending.cursor[rows.taken] += rows.lengths
        pending.use.tokens_run += rows.num_tokens
        span = pending.span
        step_index = self._index[span]
        step_index.in_flight[rows.slots] += 1
        if rows.is_last:
            pending.state[index] = RowState.RUNNING
            pending.use.rows_run += len(index)
            for number, behind in step_index.given(rows.slots, pending.admission.after[0, index]):
                self._may_run(self._pending[span][number], behind)

    def returned(self, rows: ScheduledRows) -> None:
        """These rows came back from the engine."""
        self._index[rows.pending.span].in_flight[rows.slots] -= 1

    def done(self, pending: PendingStep, index: NDArray[np.int64]) -> None:
        """Rows (positions in the admission) are done; they were the first of their sequences on the span."""
        pending.state[index] = RowState.DONE
        pending.num_unfinished -= len(index)
        pending.num_done += len(index)
        self._num_rows -= len(index)
        pending.use.rows -= len(index)
        if not pending.num_unfinished:
            self.ended.append(pending)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def refuse(self, pending: PendingStep, index: int, refusal: Refusal, refusal_behind: Refusal | None = None) -> None:
        """Drop an admitted row; the steps behind it are refused untouched. None of them is in flight.

        refusal_behind: what is said of those, by default PREDECESSOR_REFUSED."""
        span, slot, first = pending.span, int(pending.admission.slots[index]), int(pending.admission.after[0, index])
        ledger = self._table.ledger
        behind = refusal_behind or ledger.refusal(Reason.PREDECESSOR_REFUSED, span, slot)
        for step in range(first, int(ledger.tail.step[span, slot]) + 1):
            dropped, at = self._find(span, slot, step)
            reason = behind if step > first else refusal
            self._table.replies.cancel(int(dropped.reserved_bytes[at]))
            if dropped.state[at] == RowState.WAITING:
                self._index[span].not_given[slot] -= 1
            dropped.refuse(at, reason)
            self._observer.refused(reason.reason, 1)
            if not dropped.num_unfinished:
                self.ended.append(dropped)
        ledger.fall_back(span, slot)
        if first > ledger.done.step[span, slot] + 1:  # the tail is the last step that is still in flight
            last, at = self._find(span, slot, first - 1)
            ledger.take(span, last.admission, np.array([at]))
        self.places.drop(span, slot, first)
        self._table.settle(np.array([slot]))

    def poison(self, slot: int, is_lost: bool = False) -> None:
        """A slot's state can't be trusted: refuse its rows, on spans where some are in flight once they are back.

        is_lost: it went with the device, whose server is about to end; it says that alone."""
        ledger, reason = self._table.ledger, Reason.STOPPING if is_lost else Reason.STATE_POISONED
        if not is_lost:
            self._table.poison(slot)
        for span, step_index in enumerate(self._index):
            steps = range(int(ledger.done.step[span, slot]) + 1, int(ledger.tail.step[span, slot]) + 1)
            if step_index.in_flight[slot]:
                step_index.not_given[slot] = 0  # what the engine does not have of them it never gets
                for step in steps:
                    pending, index = self._find(span, slot, step)
                    pending.discard(index)
            elif steps:
                pending, index = self._find(span, slot, steps[0])
                self.refuse(pending, index, ledger.refusal(reason, span, slot))

    def let_go(self, slot: int, refusal: Refusal) -> None:
        """A slot's sequence, of which nothing is in flight, is over: refuse the steps that wait for it."""
        ledger = self._table.ledger
        for span in np.flatnonzero(ledger.tail.step[:, slot] > ledger.done.step[:, slot]).tolist():
            pending, index = self._find(span, slot, int(ledger.done.step[span, slot]) + 1)
            self.refuse(pending, index, refusal, refusal)
        self.finish()

    def refuse_all(self, reason: Reason) -> None:
        """Refuse every row of which no token was taken; the others go on."""
        for by_number in self._pending:
            for pending in list(by_number.values()):
                self._refuse_not_begun(pending, reason)

    def drop_overdue(self, now_s: float) -> None:
        """Refuse rows whose queue deadline passed before their first chunk, and what waits behind them."""
        while self.deadlines and self.deadlines[0][0] <= now_s:
            _, number, span = heapq.heappop(self.deadlines)
            if number in self._pending[span]:
                self._refuse_not_begun(self._pending[span][number], Reason.QUEUE_DEADLINE)

    def finish(self) -> None:
        """Tell the results of what has ended, and of what joined it behind it."""
        while self.ended:
            ended, self.ended = self.ended, []
            for pending in ended:
                by_number = self._pending[pending.span]
                if pending.number in by_number and pending.can_finish:
                    if not pending.is_finished:
                        pending.finish()
                    del by_number[pending.number]
                    num_left, num_bytes = pending.form.num_rows - pending.num_done, pending.request.hidden.nbytes
                    self._num_rows -= num_left
                    self._num_bytes -= num_bytes
                    pending.use.give_back(pending.request, num_left)
                    self.ended += pending.joiners
        if not any(self._pending):
            self._idle.set()

    def _freed(self, span: int, number: int, index: NDArray[np.int64]) -> None:
        """Rows (positions in the admission of a pending step) wait behind no place any more."""
        self._may_run(self._pending[span][number], index)

    def _may_run(self, pending: PendingStep, index: NDArray[np.int64]) -> None:
        """Rows (positions in the admission) may run; beside the first ones, those not admitted get their places."""
        if len(pending.padding):
            index, pending.padding = np.concatenate((index, pending.padding)), index[:0]
            index = index[pending.rows[index].argsort()]
        self.ready[pending.span].add(pending, index)

    def _refuse_not_begun(self, pending: PendingStep, reason: Reason) -> None:
        for index in pending.not_begun().tolist():
            if pending.state[index] == RowState.WAITING:  # not dropped meanwhile with the one before it
                slot = int(pending.admission.slots[index])
                self.refuse(pending, index, self._table.ledger.refusal(reason, pending.span, slot))

    def _watch_deadline(self, pending: PendingStep, deadline_s: float) -> None:
        """Remember a deadline; those of finished steps are forgotten once they are the most."""
        heapq.heappush(self.deadlines, (deadline_s, pending.number, pending.span))
        if len(self.deadlines) > 64 + 2 * sum(map(len, self._pending)):
            self.deadlines = [entry for entry in self.deadlines if entry[1] in self._pending[entry[2]]]
            heapq.heapify(self.deadlines)

    def _find(self, span: int, slot: int, step: int) -> tuple[PendingStep, int]:
        """Whose row a step in flight is, and its position in the admission."""
        number, index = self._index[span].entry(slot, step)
        return self._pending[span][number], index
