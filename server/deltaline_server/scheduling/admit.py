"""Admission: which rows of a step request are new, which came before, which are refused; and what the new ones take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, Refusal
from deltaline_server.scheduling.pending import Join, PendingStep
from deltaline_server.scheduling.queue import Queue
from deltaline_server.step import StepRequest
from deltaline_server.tables.kept_replies import KeptReply
from deltaline_server.tables.ledger import Admission, Slots
from deltaline_server.tables.pages import PagePool
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequences import SequenceTable

OPEN = bytes([SequenceState.OPEN])


def admit(request: StepRequest, table: SequenceTable, queue: Queue) -> tuple[PendingStep, Slots]:
    """Judge every row, and take what the new ones need: bytes of replies, pages, their place in the ledger.

    Returns the pending step, and the slots whose lease the request renews. Raises RequestError (QUEUE_FULL,
    QUOTA_EXCEEDED, REPLY_BYTES_EXHAUSTED) when the request can't be taken; then no row was touched.
    """
    form, ledger, pages = request.form, table.ledger, table.pages
    slots, states = table.lookup(form.server_epoch, form.handle, request.principal)
    finite = request.finite_rows()
    admission: Admission | None = None
    joins: list[Join] = []
    refusals: dict[int, Refusal] = {}
    kept: dict[int, KeptReply] = {}
    if finite is None and states.tobytes() == OPEN * form.num_rows:
        admission = ledger.admit_plain(request, slots)
    if admission is None:
        admission, joins, refusals, kept = _judge(request, table, queue, slots, states, finite)
    if pages is not None and form.span not in pages.spans:
        pages = None
    if pages is not None:
        admission = _judge_pages(admission, request, table, pages, refusals)
    queue.reserve(request, admission, len(joins))
    if pages is not None:
        pages.grant(*_pages_of(admission, request, table))
    ledger.take(form.span, admission)
    live = np.delete(slots, list(refusals)) if refusals else slots
    return PendingStep(request, admission, joins, refusals, kept), live


def _judge(
    request: StepRequest,
    table: SequenceTable,
    queue: Queue,
    slots: Slots,
    states: NDArray[np.uint8],
    finite: NDArray[np.bool_] | None,
) -> tuple[Admission, list[Join], dict[int, Refusal], dict[int, KeptReply]]:
    """Judge every row but for its pages: each is admitted, joins a step in flight, is refused, or has a kept reply."""
    ledger, span = table.ledger, request.form.span
    is_held = states == SequenceState.OPEN
    refusals = {i: table.refusal(int(states[i]), int(slots[i]), span) for i in np.flatnonzero(~is_held).tolist()}
    if refusals:
        refusals |= table.moved_refusals(request.form.server_epoch, request.form.handle, states, request.principal)
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
    admission, refused = ledger.admit(request, new, slots[new], request.form.lengths[new])
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
    return admission, joins, refusals, kept


def _judge_pages(
    admission: Admission, request: StepRequest, table: SequenceTable, pages: PagePool, refusals: dict[int, Refusal]
) -> Admission:
    """Admit no new steps that would make a sequence too long, nor those for which there are no pages.

    Mutates refusals: it gets those of these rows.
    """
    for reason in (Reason.CONTEXT_EXCEEDED, Reason.PAGES_EXHAUSTED):
        lines, ends = _pages_of(admission, request, table)
        is_bad = ends > pages.max_context if reason is Reason.CONTEXT_EXCEEDED else pages.lacking(lines, ends)
        if not is_bad.any():
            continue
        for i in np.flatnonzero(is_bad).tolist():
            refusal = table.ledger.refusal(reason, request.form.span, int(admission.slots[i]))
            if reason is Reason.CONTEXT_EXCEEDED:
                text = f"the sequence would have {ends[i]} tokens, at most {pages.max_context} fit (max_context)"
                refusal = replace(refusal, message=text)
            refusals[int(admission.rows[i])] = refusal
        admission = admission.only(np.flatnonzero(~is_bad))
    return admission


def _pages_of(
    admission: Admission, request: StepRequest, table: SequenceTable
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lines of the admitted rows, and the tokens for which they need pages, drafts included; int64 [rows] each."""
    ends = (request.position + request.form.lengths)[admission.rows]
    return table.write_line[admission.slots], ends
