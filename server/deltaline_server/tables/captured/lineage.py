"""Which snapshot each sequence was last captured as, or began with: what its next one continues."""

from __future__ import annotations

import numpy as np

from deltaline_server.tables.sequences import SequenceTable


class Lineage:
    """By slot, for as long as the sequence is in it."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        # With the sequence's handle, so that what another had in the slot is not its own.
        self._last: dict[int, tuple[int, bytes]] = {}

    def of(self, slot: int) -> bytes | None:
        """What the sequence in a slot goes on from, which may be over; None for the beginning."""
        handle, snapshot = self._last.get(slot, (0, None))
        return snapshot if handle == self._handle(slot) else None

    def goes_on(self, slot: int, snapshot: bytes | None) -> None:
        """The sequence in a slot goes on from a snapshot, or None."""
        if snapshot is not None:
            self._last[slot] = self._handle(slot), snapshot

    def _handle(self, slot: int) -> int:
        return int(self._table.handles(np.array([slot]))[0])
