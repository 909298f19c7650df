"""Kept replies: the latest reply of each (sequence, span), with the request that it answered.

Knows bytes and cells (span, slot); not steps' rules nor what outputs mean. Memory is bounded: a reply's bytes are
reserved before its step is taken, and every byte is counted until the cell's next step is done or the sequence is gone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.step import StepRequest

# A row's request is kept whole up to this size, as a checksum beyond it.
WHOLE_REQUEST_BYTES = 16384
CHECKSUM_BYTES = 32


@dataclass(frozen=True)
class Fingerprint:
    """What makes two row requests the same: its scalars, and its hidden states or their checksum."""

    kind: int
    position: int
    accepted: int
    output: int
    hidden: bytes

    @classmethod
    def of(cls, request: StepRequest, row: int) -> Fingerprint:
        begin, end = request.query_start_loc[row], request.query_start_loc[row + 1]
        hidden = request.hidden[begin:end]
        if hidden.nbytes <= WHOLE_REQUEST_BYTES:
            kept = hidden.tobytes()
        else:
            kept = hashlib.blake2b(hidden.view(np.uint8).data, digest_size=CHECKSUM_BYTES).digest()
        return cls(
            int(request.kind[row]), int(request.position[row]), int(request.accepted[row]), int(request.output), kept
        )


def fingerprint_bytes(row_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes that the kept request of rows of these sizes takes."""
    return np.where(row_bytes <= WHOLE_REQUEST_BYTES, row_bytes, CHECKSUM_BYTES)


@dataclass(frozen=True)
class KeptReply:
    """The reply to one row: its outputs [rows, hidden] and its position after the step."""

    fingerprint: Fingerprint
    hidden: NDArray[Any]
    position: int


@dataclass(eq=False)
class Answers:
    """A whole request and its outputs, kept as they are while most of their rows are the latest of their cells.

    output_start int64 [N + 1] and position int64 [N] by request row. rows: which row answers a slot. live_bytes: of the
    rows that are still kept.
    """

    request: StepRequest
    outputs: NDArray[Any]
    output_start: NDArray[np.int64]
    position: NDArray[np.int64]
    rows: dict[int, int]
    live_bytes: int

    def reply(self, slot: int) -> KeptReply:
        """The reply to the row of a slot; a view."""
        row = self.rows[slot]
        outputs = self.outputs[self.output_start[row] : self.output_start[row + 1]]
        return KeptReply(Fingerprint.of(self.request, row), outputs, int(self.position[row]))

    @property
    def is_sparse(self) -> bool:
        """Whether the arrays take more than twice what is kept of them; shared memory is not taken from the server."""
        request = self.request
        taken = (not request.is_input_shared) * request.hidden.nbytes
        taken += (request.output_memory is None) * self.outputs.nbytes
        return taken > 2 * self.live_bytes


class KeptReplies:
    """One reply per cell (span, slot), within a budget of bytes.

    Nothing is copied while a request's rows are superseded together, as a decode batch's are; rows that stay behind are
    copied out once less than half of their request is still kept. So memory is at most twice the bytes counted.
    """

    def __init__(self, num_spans: int, num_slots: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._kept: list[list[Answers | KeptReply | None]] = [[None] * num_slots for _ in range(num_spans)]
        self._bytes = np.zeros((num_spans, num_slots), dtype=np.int64)

    def reserve(self, num_bytes: int, span: int, slots: NDArray[np.int64]) -> None:
        """Set aside bytes for replies to come.

        slots: those of the steps' cells that have no step in flight. When the bytes do not fit beside their present
        replies, those are given up: whoever sends the next step, with none in flight, has had the one before. Raises
        RequestError REPLY_BYTES_EXHAUSTED; then nothing is set aside or given up.
        """
        if self.used_bytes + num_bytes > self.limit_bytes:
            present = int(self._bytes[span, slots].sum())
            free = self.limit_bytes - self.used_bytes + present
            if num_bytes > free:
                raise RequestError(
                    Reason.REPLY_BYTES_EXHAUSTED,
                    f"{num_bytes} bytes of replies asked for, {free} are free",
                    retry_after_s=0.05,
                )
            for slot in slots.tolist():
                self._forget(span, slot)
        self.used_bytes += num_bytes

    def cancel(self, num_bytes: int) -> None:
        """Give back bytes that were reserved for a step that was refused after all."""
        self.used_bytes -= num_bytes

    def get(self, span: int, slot: int) -> KeptReply | None:
        kept = self._kept[span][slot]
        return kept.reply(slot) if isinstance(kept, Answers) else kept

    def put(self, span: int, answers: Answers, num_bytes: NDArray[np.int64]) -> None:
        """Keep the answers in place of their cells' former replies; num_bytes [rows] were reserved for their rows."""
        slots = list(answers.rows)
        self._supersede(span, slots)
        answers.live_bytes = int(num_bytes.sum())
        self._bytes[span, slots] = num_bytes
        cells = self._kept[span]
        for slot in slots:
            cells[slot] = answers
        if answers.is_sparse:
            self._copy_out(span, answers)

    def drop(self, slot: int) -> None:
        """Forget the replies of a slot on every span."""
        for span in range(len(self._kept)):
            self._forget(span, slot)

    def _forget(self, span: int, slot: int) -> None:
        self._supersede(span, [slot])
        self._bytes[span, slot] = 0
        self._kept[span][slot] = None

    def _supersede(self, span: int, slots: list[int]) -> None:
        """These cells' replies are over."""
        num_bytes = self._bytes[span, slots].tolist()
        self.used_bytes -= sum(num_bytes)
        thinned: dict[int, Answers] = {}
        cells = self._kept[span]
        for slot, size in zip(slots, num_bytes, strict=True):
            kept = cells[slot]
            if isinstance(kept, Answers):
                kept.live_bytes -= size
                cells[slot] = None
                thinned[id(kept)] = kept
        for answers in thinned.values():
            if answers.live_bytes and answers.is_sparse:
                self._copy_out(span, answers)

    def _copy_out(self, span: int, answers: Answers) -> None:
        """Let the cells that still hold these answers hold copies of their own rows instead."""
        cells = self._kept[span]
        for slot in answers.rows:
            if cells[slot] is answers:
                reply = answers.reply(slot)
                cells[slot] = KeptReply(reply.fingerprint, reply.hidden.copy(), reply.position)
