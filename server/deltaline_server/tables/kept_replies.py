"""Kept replies: the latest reply of each (sequence, span), with the request that it answered.

Memory is bounded: a reply's bytes are
reserved before its step is taken, and every byte is counted until the cell's next step is done or the sequence is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.finite import checksum
from deltaline_server.step import (
    WAYPOINT_BYTES,
    WHOLE_REQUEST_BYTES,
    LeftWaypoint,
    RowKind,
    RowWaypoints,
    StepRequest,
)

# As many as may be in flight: a client that has had no answer for that long sends nothing more.
KEPT_STEPS = 8


@dataclass(frozen=True)
class Fingerprint:
    """What makes two row requests the same: its scalars, its waypoints, and its hidden states or their checksum."""

    kind: int
    position: int
    accepted: int
    output: int
    hidden: bytes
    waypoints: RowWaypoints | None

    @classmethod
    def of(cls, request: StepRequest, row: int) -> Fingerprint:
        form = request.form
        hidden = request.hidden[form.query_start_loc[row] : form.query_start_loc[row + 1]]
        if hidden.nbytes <= WHOLE_REQUEST_BYTES:
            kept = hidden.tobytes()
        else:
            kept = checksum(hidden) if request.checksum is None else request.checksum.result()
        accepted, waypoints = int(form.accepted[row]), form.waypoints.get(row)
        return cls(int(form.kind[row]), int(request.position[row]), accepted, int(form.output), kept, waypoints)


@dataclass(frozen=True)
class KeptReply:
    """The reply to one row: its outputs [rows, hidden], its position after the step, what became of its waypoints."""

    fingerprint: Fingerprint
    hidden: NDArray[Any]
    position: int
    waypoints: Sequence[LeftWaypoint] = ()


@dataclass(eq=False)
class Answers:
    """A whole request and its outputs, kept as they are while most of their rows are the latest of their cells.

    output_start int64 [N + 1] and position int64 [N] by request row. rows int64 [kept]: those that are kept, slots
    beside them. waypoints: what became of those of each row that has any. live_rows, live_bytes: of those that no later
    step has superseded.
    """

    request: StepRequest
    outputs: NDArray[Any]
    output_start: NDArray[np.int64]
    position: NDArray[np.int64]
    slots: NDArray[np.int64]
    rows: NDArray[np.int64]
    waypoints: Mapping[int, Sequence[LeftWaypoint]] = field(default_factory=dict)
    live_rows: int = 0
    live_bytes: int = 0

    def reply(self, row: int) -> KeptReply:
        """The reply to a row; a view."""
        outputs = self.outputs[self.output_start[row] : self.output_start[row + 1]]
        fingerprint, waypoints = Fingerprint.of(self.request, row), self.waypoints.get(row, ())
        return KeptReply(fingerprint, outputs, int(self.position[row]), waypoints)

    @property
    def is_sparse(self) -> bool:
        """Whether the arrays take more than twice what is kept of them; shared memory is not taken from the server."""
        request = self.request
        taken = (not request.is_input_shared) * request.hidden.nbytes
        taken += (request.output_memory is None) * self.outputs.nbytes
        return taken > 2 * self.live_bytes


@dataclass(frozen=True, eq=False)
class PrefillAnswer:
    """A request of one PREFILL row, step `step` of its cell, with its outputs [rows, hidden] and position after it."""

    step: int
    request: StepRequest
    outputs: NDArray[Any]
    position: int
    waypoints: Sequence[LeftWaypoint] = ()

    @property
    def num_bytes(self) -> int:
        asked = self.request.form.waypoints.get(0)
        places_bytes = WAYPOINT_BYTES * asked.num_places if asked else 0
        return self.request.hidden.nbytes + self.outputs.nbytes + places_bytes


def is_streamed(request: StepRequest) -> bool:
    """Whether a request may be a part of a streamed prefill: one PREFILL row, alone, nothing of it in shared memory.

    What lies there the client may use for other things once it has the reply, so it is kept no longer than that.
    """
    is_shared = request.is_input_shared or request.output_memory is not None
    return not is_shared and request.form.num_rows == 1 and int(request.form.kind[0]) == RowKind.PREFILL


class EarlierReplies:
    """Of each cell the answers of its last PREFILL steps, up to the latest; any other step ends them.

    So a client that loses its connection with `max_steps` of them in flight finds every reply again.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._cells: dict[tuple[int, int], deque[PrefillAnswer]] = {}
        self.used_bytes = 0

    def add(self, span: int, slot: int, answer: PrefillAnswer, free_bytes: int) -> None:
        """A PREFILL step is done. It is kept if its bytes are free; without it the steps before it are of no use."""
        # Put back behind the others: those in front are given up first.
        kept = self._cells[span, slot] = self._cells.pop((span, slot), deque())
        while len(kept) >= self._max_steps:
            self.used_bytes -= kept.popleft().num_bytes
        if answer.num_bytes > free_bytes or (kept and kept[-1].step != answer.step - 1):
            self.end(span, slot)
            return
        kept.append(answer)
        self.used_bytes += answer.num_bytes

    def end(self, span: int, slot: int) -> None:
        """Forget the answers of a cell."""
        for answer in self._cells.pop((span, slot), ()):
            self.used_bytes -= answer.num_bytes

    def get(self, span: int, slot: int, step: int) -> PrefillAnswer | None:
        """The answer to a step of a cell, if it is kept."""
        return next((answer for answer in self._cells.get((span, slot), ()) if answer.step == step), None)

    def give_up(self, num_bytes: int) -> None:
        """Forget cells, the longest unused first, until so many bytes are free or none is left."""
        wanted = self.used_bytes - num_bytes
        while self._cells and self.used_bytes > max(0, wanted):
            self.end(*next(iter(self._cells)))


class KeptReplies:
    """One reply per cell (span, slot), within a budget of bytes.

    Nothing is copied while a request's rows are superseded together, as a decode batch's are; rows that stay behind are
    copied out once less than half of their request is still kept. So memory is at most twice the bytes counted.
    """

    def __init__(self, num_spans: int, num_slots: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._num_spans = num_spans
        self._kept: dict[int, Answers | KeptReply] = {}
        self._last_number = 0
        # Of each cell: the number of what is kept for it, 0 for nothing; its row there; its bytes.
        self._number, self._row, self._bytes = np.zeros((3, num_spans, num_slots), dtype=np.int64)
        self.earlier = EarlierReplies(KEPT_STEPS)

    def reserve(self, num_bytes: int, span: int, slots: NDArray[np.int64]) -> None:
        """Set aside bytes for replies to come.

        slots: those of the steps' cells that have no step in flight. When the bytes do not fit beside their present
        replies, those are given up: whoever sends the next step, with none in flight, has had the one before. Raises
        RequestError REPLY_BYTES_EXHAUSTED; then nothing is set aside or given up.
        """
        if self.used_bytes + num_bytes > self.limit_bytes:
            free = self.limit_bytes - self.used_bytes + self.num_bytes(span, slots)
            if num_bytes > free:
                raise RequestError(
                    Reason.REPLY_BYTES_EXHAUSTED,
                    f"{num_bytes} bytes of replies asked for, {free} are free",
                    retry_after_s=0.05,
                )
            self._forget(span, slots)
        self.earlier.give_up(self.used_bytes + num_bytes + self.earlier.used_bytes - self.limit_bytes)
        self.used_bytes += num_bytes

    def num_bytes(self, span: int | slice, slots: NDArray[np.int64] | NDArray[np.bool_]) -> int:
        """Of the replies that cells have."""
        return int(self._bytes[span, slots].sum())

    def get_earlier(self, span: int, slot: int, step: int, fingerprint: Fingerprint) -> KeptReply | None:
        """The reply to a PREFILL step before the latest, if it is kept and answered the same request."""
        answer = self.earlier.get(span, slot, step)
        if answer is None or Fingerprint.of(answer.request, 0) != fingerprint:
            return None
        return KeptReply(fingerprint, answer.outputs, answer.position, answer.waypoints)

    def cancel(self, num_bytes: int) -> None:
        """Give back bytes that were reserved for a step that was refused after all."""
        self.used_bytes -= num_bytes

    def get(self, span: int, slot: int) -> KeptReply | None:
        kept = self._kept.get(int(self._number[span, slot]))
        return kept.reply(int(self._row[span, slot])) if isinstance(kept, Answers) else kept

    def put(self, span: int, answers: Answers, num_bytes: NDArray[np.int64]) -> None:
        """Keep the answers in place of their cells' former replies; num_bytes [rows] were reserved for their rows."""
        slots = answers.slots
        self._supersede(span, slots)
        answers.live_rows, answers.live_bytes = len(slots), int(num_bytes.sum())
        number = self._add(answers)
        self._number[span, slots] = number
        self._row[span, slots] = answers.rows
        self._bytes[span, slots] = num_bytes
        if answers.is_sparse:
            self._copy_out(span, number, answers)
        self._put_earlier(span, answers)

    def put_one(self, span: int, slot: int, reply: KeptReply, num_bytes: int) -> None:
        """Keep a reply that came from elsewhere for a cell that has none; num_bytes were reserved for it."""
        self._number[span, slot], self._row[span, slot] = self._add(reply), 0
        self._bytes[span, slot] = num_bytes

    def _put_earlier(self, span: int, answers: Answers) -> None:
        """Keep a PREFILL step's answer beside those of the steps before it; other steps end these."""
        request, slots = answers.request, answers.slots
        if is_streamed(request):
            step, position = int(request.step[0]), int(answers.position[0])
            answer = PrefillAnswer(step, request, answers.outputs, position, answers.waypoints.get(0, ()))
            free_bytes = self.limit_bytes - self.used_bytes - self.earlier.used_bytes
            self.earlier.add(span, int(slots[0]), answer, free_bytes)
        elif self.earlier.used_bytes:
            for slot in slots.tolist():
                self.earlier.end(span, slot)

    def drop(self, slot: int) -> None:
        """Forget the replies of a slot on every span."""
        for span in range(self._num_spans):
            self._forget(span, np.array([slot]))
            self.earlier.end(span, slot)

    def _add(self, kept: Answers | KeptReply) -> int:
        """Keep it under a number of its own."""
        self._last_number += 1
        self._kept[self._last_number] = kept
        return self._last_number

    def _forget(self, span: int, slots: NDArray[np.int64]) -> None:
        self._supersede(span, slots)
        self._number[span, slots] = 0
        self._bytes[span, slots] = 0

    def _supersede(self, span: int, slots: NDArray[np.int64]) -> None:
        """These cells' replies are over. What the cells hold is for the caller to set."""
        numbers, sizes = self._number[span].take(slots), self._bytes[span].take(slots)
        self.used_bytes -= int(sizes.sum())
        for number in dict.fromkeys(numbers.tolist()):  # nearly always one: a batch that is stepped again and again
            kept = self._kept.get(number)
            if not isinstance(kept, Answers):
                self._kept.pop(number, None)
                continue
            over = sizes[numbers == number]
            kept.live_rows -= len(over)
            kept.live_bytes -= int(over.sum())
            if not kept.live_rows:
                del self._kept[number]
            elif kept.is_sparse:
                self._number[span, slots] = 0
                self._copy_out(span, number, kept)

    def _copy_out(self, span: int, number: int, answers: Answers) -> None:
        """Let the cells that still hold these answers hold copies of their own rows instead."""
        holds = self._number[span, answers.slots] == number
        for slot, row in zip(answers.slots[holds].tolist(), answers.rows[holds].tolist(), strict=True):
            reply = answers.reply(row)
            self._number[span, slot] = self._add(replace(reply, hidden=reply.hidden.copy()))
        del self._kept[number]
