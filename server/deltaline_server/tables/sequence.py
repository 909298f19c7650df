"""One sequence as its owner sees it: its state, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from deltaline_server.errors import Reason
from deltaline_server.tables.sequence_adapters import BASE, BoundAdapter


class SequenceState(IntEnum):
    """The state of a sequence; the values of deltaline.v1.SequenceState, FREE apart."""

    FREE = 0
    OPEN = 1
    CLOSING = 2
    POISONED = 3
    CLOSED = 4
    EXPIRED = 5
    LOST = 6
    UNKNOWN = 7


GONE = {
    SequenceState.CLOSED: (Reason.SEQUENCE_CLOSED, "the sequence was closed"),
    SequenceState.EXPIRED: (Reason.SEQUENCE_EXPIRED, "the sequence's lease ran out and its state is gone"),
    SequenceState.LOST: (Reason.STATE_LOST, "the server process that held this sequence is gone"),
    SequenceState.UNKNOWN: (Reason.SEQUENCE_UNKNOWN, "no sequence has this handle"),
}


@dataclass(frozen=True)
class SpanProgress:
    """How far a sequence is on one span; the fields of deltaline.v1.SpanProgress."""

    step: int
    position: int
    steps_in_flight: int
    pending_tokens: int


@dataclass(frozen=True)
class SequenceDescription:
    """What the table holds of one sequence."""

    state: SequenceState
    lease_remaining_s: float = 0.0
    spans: tuple[SpanProgress, ...] = ()
    adapter: BoundAdapter = BASE
