"""One call at a time on a span of a sequence: a call holds what it steps or commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

import numpy as np

from deltaline_client._exceptions import DuplicateSequence
from deltaline_client._state import ClientState
from deltaline_client._steps.sequence import Progress, SequenceRecord
from deltaline_client._table import Numbers, SequenceTable, Slots
from deltaline_client._transport.flow import Server

# Groups that a client remembers. All are forgotten at once: a decode loop has few, and soon has them again.
MOST_GROUPS = 16

_SLOT, _TABLE = attrgetter("_slot"), attrgetter("_table")


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """Sequences that are stepped together, each once. slots: theirs in the table. handles: as they lie on the wire.

    at: the server that holds the first. has_one_epoch: whether one process holds them all. moves: of how many moves of
    the table's sequences this is known. A decode loop steps the same group again and again, so what follows from its
    sequences is remembered by the client, until one of them may have been moved.
    """

    sequences: tuple[SequenceRecord, ...]
    table: SequenceTable
    slots: Slots
    at: Server
    handles: bytes
    has_one_epoch: bool
    moves: int

    @classmethod
    def of(cls, client: ClientState, sequences: Sequence[SequenceRecord]) -> Group:
        """The group of sequences, in their order.

        Raises DuplicateSequence when one is there twice, ValueError when not all were opened by one client.
        """
        own = tuple(sequences)
        key = own[0] if own else None, len(own)
        found = client._groups.get(key)
        if found is None or found.sequences != own or found.moves != found.table.moves:
            if len(client._groups) >= MOST_GROUPS:
                client._groups.clear()
            found = client._groups[key] = cls._made(own)
        return found

    @classmethod
    def _made(cls, sequences: tuple[SequenceRecord, ...]) -> Group:
        if len(set(sequences)) < len(sequences):
            first = {sequence: row for row, sequence in reversed(list(enumerate(sequences)))}
            again = next(row for row, sequence in enumerate(sequences) if first[sequence] != row)
            raise DuplicateSequence(f"rows {first[sequences[again]]} and {again} are of the same sequence")
        tables: set[SequenceTable] = set(map(_TABLE, sequences))
        if len(tables) > 1:
            raise ValueError("sequences: expected those that one client opened, got sequences of several clients")
        table = tables.pop() if tables else SequenceTable()
        slots = np.fromiter(map(_SLOT, sequences), np.intp, len(sequences))
        at, handles, has_one_epoch, moves = table.homes(slots)
        return cls(sequences, table, slots, at, handles.tobytes(), has_one_epoch, moves)


class Hold:
    """Keeps other calls away from one span of a group while this one reads and changes its progress.

    A context manager that gives itself: all sequences are held or none. numbers: of each Column those of the sequences,
    [Column, N], as they were when this call began; nobody else changes them until it ends. is_plain: whether none of
    them has anything but steps and tokens that are done. Entering raises SequenceBusy when another call holds one of
    the sequences.
    """

    numbers: Numbers
    is_plain: bool

    def __init__(self, group: Group, span: int) -> None:
        self.group, self._span = group, span
        self.ledger = group.table.ledger(span)

    @property
    def progress(self) -> list[Progress]:
        """The progress of each sequence, in order."""
        return [one.progress(self._span) for one in self.group.sequences]

    def __enter__(self) -> Self:
        self.numbers, self.is_plain = self.ledger.hold(self.group.slots)
        return self

    def __exit__(self, *exception: object) -> None:
        self.ledger.let_go(self.group.slots)
