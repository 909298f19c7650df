"""Frozen lines that sequences have yet to step on from, as far as they alone keep them from others.

A line that one sequence waits on is given back to it to write (Capture.thaw), unless it has stepped on another span;
two or more keep it until they step. So where there are several spans one sequence is as good as two.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from deltaline_server.tables.captured.room import Room
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.lines import NULL_LINE
from deltaline_server.tables.sequences import SequenceTable


class Waiting:
    """Counts what sequences keep, and what they would keep. All methods belong to the table's thread."""

    def __init__(self, table: SequenceTable, room: Room) -> None:
        self._table, self._room = table, room
        self._keepers = 2 if table.ledger.num_spans == 1 else 1

    def num_lines(self, owner: int | None = None) -> int:
        """Lines that sequences of an owner (of anybody) keep, or may, as enough of them wait on each; but those that a
        pinned snapshot or a state under way holds as well."""
        table = self._table
        reads = np.bincount(self._reads(None)[0], minlength=table.lines.num_lines + 1)
        is_theirs = table.lines.references() == reads + self._room.line_holders()
        return int(np.count_nonzero((self._num_waiting(owner) >= self._keepers) & is_theirs))

    def num_more_of_create(self, slots: Slots) -> int:
        """Lines that are kept once snapshots of slots are there, and then gone, and are not now."""
        return self.num_more_of_fork(slots) if self._keepers == 1 else 0

    def num_more_of_fork(self, slots: Slots) -> int:
        """Lines that are kept once slots are forked, and are not now."""
        table = self._table
        lines = np.unique(table.read_line[:, slots])  # the parent waits as well
        return int(np.count_nonzero(self._num_waiting(None)[lines[lines != NULL_LINE]] < self._keepers))

    def num_more_of_restore(self, states: Iterable[CapturedState]) -> int:
        """The same once a sequence begins from each of these states, which may repeat."""
        before = self._num_waiting(None)
        after = before.copy()
        for state in states:
            after[np.unique(state.read_line)] += 1
        after[NULL_LINE] = 0
        return int(np.count_nonzero((before < self._keepers) & (after >= self._keepers)))

    def _num_waiting(self, owner: int | None) -> NDArray[np.int64]:
        """How many sequences of an owner wait on each line, int64 [lines + 1]."""
        lines, slots = self._reads(owner)
        pairs = np.unique(lines * self._table.num_slots + slots)
        return np.bincount(pairs // self._table.num_slots, minlength=self._table.lines.num_lines + 1)

    def _reads(self, owner: int | None) -> tuple[NDArray[np.int64], Slots]:
        """The frozen line and the slot of each span that reads one."""
        table = self._table
        is_read = (table.read_line != NULL_LINE) & (table.read_line != table.write_line)
        if owner is not None:
            is_read &= table.principal == owner
        spans, slots = np.nonzero(is_read)
        return table.read_line[spans, slots], slots
