"""Handles: what names a sequence, 40 random bits over the number of its slot."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from deltaline_server.tables.ledger import Slots

SLOT_BITS = 24
MAX_SLOTS = (1 << SLOT_BITS) - 1
_SLOT_MASK = np.uint64(MAX_SLOTS)


def make_handles(slots: Slots) -> NDArray[np.uint64]:
    """Make new handles for slots, uint64 [len(slots)]; never 0."""
    random = np.array([secrets.randbits(40) or 1 for _ in range(len(slots))], dtype=np.uint64)
    handles: NDArray[np.uint64] = (random << np.uint64(SLOT_BITS)) | slots.astype(np.uint64)
    return handles


def slots_of(handles: NDArray[np.uint64]) -> Slots:
    """The slots that handles name, int64 [N], in range or not."""
    return (handles & _SLOT_MASK).view(np.int64)
