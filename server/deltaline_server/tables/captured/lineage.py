"""Which snapshot each sequence was last captured as, or began with: what its next one continues."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltaline_server.tables.sequence import slots_of
from deltaline_server.tables.sequences import SequenceTable


class Lineage:
    """By slot, for as long as the sequence is in it."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        # With the sequence's handle, so that what another had in the slot is not its own.
        self._handles = np.zeros(table.num_slots, dtype=np.uint64)
        self._last: list[bytes | None] = [None] * table.num_slots

    def of(self, slot: int) -> bytes | None:
        """What the sequence in a slot goes on from, which may be over; None for the beginning."""
        return self._last[slot] if self._table.handles(np.array([slot]))[0] == self._handles[slot] else None

    def go_on(self, handles: NDArray[np.uint64], snapshot: bytes | None) -> None:
        """Sequences go on from a snapshot, or None."""
        slots = slots_of(handles)
        self._handles[slots] = handles
        for slot in slots.tolist():
            self._last[slot] = snapshot
