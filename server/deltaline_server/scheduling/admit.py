"""The verdict on a step request: which rows are new, which came before, which are refused.

Judges only; takes nothing (scheduler.py does).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, Refusal
from deltaline_server.scheduling.pending import Join
from deltaline_server.scheduling.queue import JobQueue
from deltaline_server.step import StepRequest
from deltaline_server.tables.admission import Admission, Slots
from deltaline_server.tables.kept_replies import KeptReply
from deltaline_server.tables.pages import PageClaim, PagePool
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequences import SequenceTable

OPEN = bytes([SequenceState.OPEN])


@dataclass(slots=True)
class Verdict:
    """What is to become of each row of a request; every row is in exactly one of them.

    admission: new steps. kept: rows with a kept reply, joins: rows in flight elsewhere, refusals: the others, by row.
    slots int64 [N], meaningless for rows whose sequence is not known. claim: the pages that the new steps need, None
    where steps need none.
    """

    slots: Slots
    admission: Admission
    kept: dict[int, KeptReply]
    joins: list[Join]
    refusals: dict[int, Refusal]
    claim: PageClaim | None = None

    @property
    def answered_rows(self) -> NDArray[np.int64]:
        """Rows that get outputs."""
        if not self.kept and not self.joins:
            return self.admission.rows
        return np.array([*self.admission.rows.tolist(), *self.kept, *(join.row for join in self.joins)], dtype=np.int64)

    @property
    def live_slots(self) -> Slots:
        """Slots whose lease this request renews."""
        if len(self.admission.rows) == len(self.slots):
            return self.slots
        return self.slots[self.answered_rows]


def judge(request: StepRequest, table: SequenceTable, queue: JobQueue) -> Verdict:
    """Judge every row of a request against the table, the ledger, the queue and the pages."""
    verdict = _judge_steps(request, table, queue)
    if table.pages is not None and request.form.span in table.pages.spans:
        return _judge_pages(verdict, request, table, table.pages)
    return verdict


def _judge_pages(verdict: Verdict, request: StepRequest, table: SequenceTable, pages: PagePool) -> Verdict:
    """Refuse the new steps that would make a sequence too long, and those for which there are no pages."""
    admission, form = verdict.admission, request.form
    ends = (request.position + form.lengths)[admission.rows]  # drafts need pages as well
    lines = table.write_line[admission.slots]
    faults = {}
    for reason in (Reason.CONTEXT_EXCEEDED, Reason.PAGES_EXHAUSTED):
        is_bad = ends > pages.max_context if reason is Reason.CONTEXT_EXCEEDED else pages.lacking(lines, ends)
        if not is_bad.any():
            continue
        for i in np.flatnonzero(is_bad).tolist():
            refusal = table.ledger.refusal(reason, form.span, int(admission.slots[i]))
            if reason is Reason.CONTEXT_EXCEEDED:
                told = f"the sequence would have {ends[i]} tokens, at most {pages.max_context} fit (max_context)"
                refusal = replace(refusal, message=told)
            faults[int(admission.rows[i])] = refusal
        kept = np.flatnonzero(~is_bad)
        admission, ends, lines = admission.only(kept), ends[kept], lines[kept]
    claim = PageClaim(pages, lines, ends)
    return replace(verdict, admission=admission, refusals=verdict.refusals | faults, claim=claim)


def _judge_steps(request: StepRequest, table: SequenceTable, queue: JobQueue) -> Verdict:
    """Judge every row but for its pages."""
    ledger, span = table.ledger, request.form.span
    slots, states = table.lookup(request.form.server_epoch, request.form.handle)
    finite = request.finite_rows()
    if finite is None and states.tobytes() == OPEN * len(states):
        plain = ledger.judge_plain(request, slots)
        if plain is not None:
            return Verdict(slots, plain, {}, [], {})
    is_held = states == SequenceState.OPEN
    refusals = {i: table.refusal(int(states[i]), int(slots[i]), span) for i in np.flatnonzero(~is_held).tolist()}
    held = np.flatnonzero(is_held)
    step = request.step[held]
    done, tail = ledger.done.step[span, slots[held]], ledger.tail.step[span, slots[held]]
    stale, gap, is_new = (step < done) | (step < 1), step > tail + 1, step == tail + 1
    finite = np.ones(len(held), dtype=np.bool_) if finite is None else finite[held]
    for reason, fault in (
        (Reason.STEP_STALE, stale),
        (Reason.STEP_GAP, gap),
        (Reason.NON_FINITE_INPUT, is_new & ~finite),
    ):
        refusals |= {i: ledger.refusal(reason, span, int(slots[i])) for i in held[fault].tolist()}
    kept: dict[int, KeptReply] = {}
    for i in held[stale].tolist():
        earlier = queue.find_earlier(request, i, int(slots[i]))
        if earlier is not None:
            kept[i] = earlier
            del refusals[i]
    new = held[is_new & finite]
    admission, refused = ledger.judge(request, new, slots[new], request.form.lengths[new])
    refusals |= refused
    joins: list[Join] = []
    for i in held[~(stale | gap | is_new)].tolist():
        found = queue.find_repeated(request, i, int(slots[i]))
        if isinstance(found, KeptReply):
            kept[i] = found
        elif isinstance(found, Join):
            joins.append(found)
        else:
            refusals[i] = found
    return Verdict(slots, admission, kept, joins, refusals)
