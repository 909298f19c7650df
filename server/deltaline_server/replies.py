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


class KeptReplies:
    """One reply per cell (span, slot), within a budget of bytes."""

    def __init__(self, num_spans: int, num_slots: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._replies: list[list[KeptReply | None]] = [[None] * num_slots for _ in range(num_spans)]
        self._bytes = np.zeros((num_spans, num_slots), dtype=np.int64)

    def reserve(self, num_bytes: int) -> None:
        """Set aside bytes for replies to come. Raises RequestError REPLY_BYTES_EXHAUSTED and sets nothing aside."""
        if self.used_bytes + num_bytes > self.limit_bytes:
            raise RequestError(
                Reason.REPLY_BYTES_EXHAUSTED,
                f"{num_bytes} bytes of replies asked for, {self.limit_bytes - self.used_bytes} are free",
                retry_after_s=0.05,
            )
        self.used_bytes += num_bytes

    def cancel(self, num_bytes: int) -> None:
        """Give back bytes that were reserved for a step that was refused after all."""
        self.used_bytes -= num_bytes

    def get(self, span: int, slot: int) -> KeptReply | None:
        return self._replies[span][slot]

    def put(self, span: int, slots: list[int], replies: list[KeptReply], num_bytes: NDArray[np.int64]) -> None:
        """Keep replies in place of the cells' former ones; `num_bytes` [len(slots)] were reserved for them."""
        self.used_bytes -= int(self._bytes[span, slots].sum())
        self._bytes[span, slots] = num_bytes
        cells = self._replies[span]
        for slot, reply in zip(slots, replies, strict=True):
            cells[slot] = reply

    def drop(self, slot: int) -> None:
        """Forget the replies of a slot on every span."""
        self.used_bytes -= int(self._bytes[:, slot].sum())
        self._bytes[:, slot] = 0
        for cells in self._replies:
            cells[slot] = None
