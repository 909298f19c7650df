"""One sequence as its owner sees it: its handle, its state, and how far it is."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.sequence_adapters import BASE, BoundAdapter

# A handle is 40 random bits over the number of its slot.
SLOT_BITS = 24
MAX_SLOTS = (1 << SLOT_BITS) - 1
_SLOT_MASK = np.uint64(MAX_SLOTS)
ANOTHER_SERVER = 0
"""In place of an epoch, which never is 0: that of any process of a server with another name."""


def make_handles(slots: Slots) -> NDArray[np.uint64]:
    """Make new handles for slots, uint64 [len(slots)]; never 0."""
    random = np.frombuffer(secrets.token_bytes(8 * len(slots)), dtype=np.uint64) >> np.uint64(SLOT_BITS)
    handles: NDArray[np.uint64] = (np.maximum(random, 1) << np.uint64(SLOT_BITS)) | slots.astype(np.uint64)
    return handles


def slots_of(handles: NDArray[np.uint64]) -> Slots:
    """The slots that handles name, int64 [N], in range or not."""
    return (handles & _SLOT_MASK).view(np.int64)


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
    ELSEWHERE = 8


GONE = {
    SequenceState.CLOSED: (Reason.SEQUENCE_CLOSED, "the sequence was closed"),
    SequenceState.EXPIRED: (Reason.SEQUENCE_EXPIRED, "the sequence's lease ran out and its state is gone"),
    SequenceState.LOST: (Reason.STATE_LOST, "the server process that held this sequence is gone"),
    SequenceState.UNKNOWN: (Reason.SEQUENCE_UNKNOWN, "no sequence has this handle"),
    SequenceState.ELSEWHERE: (Reason.STATE_ELSEWHERE, "the call means another server, and this one has it not"),
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
