"""The table of a client's sequences: what it remembers of them, as arrays by slot.

A sequence object is a view of its slot, and a batch is an array of slots: what a step asks and changes of its sequences
are a few vector operations, however many they are and in whatever groups they are stepped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltaline_client._exceptions import SequenceBusy
from deltaline_client._transport.flow import Server

Slots: TypeAlias = NDArray[np.intp]
Numbers: TypeAlias = NDArray[np.int64]

_FIRST_SLOTS = 64
_NOBODY = Server(0, "")


class Column(IntEnum):
    """The numbers of a (sequence, span), all 0 at first but for the position that a sequence begins at.

    STEP: steps done. POSITION: tokens committed. PENDING: tokens of the verify that waits for its commit. COMMIT: the
    accepted count that waits for the next step and 1 more, 0 for none. COMMIT_IN_DOUBT: 1 where it was sent by itself
    and no answer came. UNFINISHED: 1 where the outcome of a step is unknown. HOLDER: 1 while a call holds it.
    """

    STEP = 0
    POSITION = 1
    PENDING = 2
    COMMIT = 3
    COMMIT_IN_DOUBT = 4
    UNFINISHED = 5
    HOLDER = 6


# As plain integers, which numpy takes several times faster.
STEP, POSITION, PENDING, COMMIT, COMMIT_IN_DOUBT, UNFINISHED, HOLDER = map(int, Column)


class Ledger:
    """How far one span of every sequence is: Column by slot. Written under the table's lock, since it may grow."""

    def __init__(self, lock: threading.Lock, begins: Numbers) -> None:
        """begins: the position at which the sequence of each slot began, [slots]."""
        self._lock = lock
        self._numbers: Numbers = np.zeros((len(Column), len(begins)), "<i8")
        self._numbers[POSITION] = begins

    def hold(self, slots: Slots) -> tuple[Numbers, bool]:
        """Keep other calls away from slots, which differ, all or none.

        Returns their numbers [Column, N], and whether all of them but STEP and POSITION are 0. Raises SequenceBusy when
        another call holds one of them.
        """
        with self._lock:
            found = self._numbers.take(slots, axis=1)
            is_plain = not np.count_nonzero(found[PENDING:])
            if not is_plain and np.count_nonzero(found[HOLDER]):
                raise SequenceBusy("another call is stepping this span of the sequence")
            self._numbers[HOLDER][slots] = 1
        return found, is_plain

    def let_go(self, slots: Slots) -> None:
        """The call that holds slots is over."""
        with self._lock:
            self._numbers[HOLDER][slots] = 0

    def write(self, slots: Slots | int, columns: Mapping[int, NDArray[Any] | int]) -> None:
        """Set columns of slots."""
        with self._lock:
            for column, values in columns.items():
                self._numbers[column][slots] = values

    def read(self, slot: int, column: int) -> int:
        """One number."""
        return int(self._numbers[column, slot])

    def grow(self, num_slots: int) -> None:
        """Make room. The caller has the lock."""
        more = np.zeros((len(Column), num_slots - self._numbers.shape[1]), "<i8")
        self._numbers = np.append(self._numbers, more, axis=1)

    def begin(self, slots: list[int], position: int) -> None:
        """Other sequences take slots and begin at a position. The caller has the lock."""
        self._numbers[:, slots] = 0
        self._numbers[POSITION, slots] = position


class Home(NamedTuple):
    """Where a sequence lives: the server process that holds it, and its handle there."""

    at: Server
    handle: int


class SequenceTable:
    """Slots of sequences, where each lives, and a Ledger per span. Threads may share it.

    epochs: of the processes that sequences were opened at. moves: how often one was moved.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[int] = []
        # Filled wherever the last reference to a sequence is dropped, also inside `take`: so no lock is taken there.
        self._dropped: deque[int] = deque()
        self._ledgers: dict[int, Ledger] = {}
        self._handles: NDArray[np.uint64] = np.zeros(0, "<u8")
        self._epochs: NDArray[np.uint64] = np.zeros(0, "<u8")
        self._servers: list[Server] = []
        # Of the spans that have no ledger yet.
        self._begins: Numbers = np.zeros(0, "<i8")
        self.epochs = set[int]()
        self.moves = 0

    def take(self, handles: Sequence[int], at: Server, position: int = 0) -> list[int]:
        """A slot for each of some sequences of a server, which have done nothing yet and begin at a position, on every
        span."""
        with self._lock:
            while self._dropped:
                self._free.append(self._dropped.popleft())
            while len(self._free) < len(handles):
                self._grow()
            slots = [self._free.pop() for _ in handles]
            self._handles[slots], self._epochs[slots], self._begins[slots] = handles, at.epoch, position
            for slot in slots:
                self._servers[slot] = at
            self.epochs.add(at.epoch)
            for ledger in self._ledgers.values():
                ledger.begin(slots, position)
        return slots

    def home(self, slot: int) -> Home:
        """Where the sequence of a slot lives."""
        with self._lock:
            return Home(self._servers[slot], int(self._handles[slot]))

    def homes(self, slots: Slots) -> tuple[Server, NDArray[np.uint64], bool, int]:
        """Where the sequences of slots live: the first one's server, the handles, whether one process holds them all;
        and of how many moves this is known."""
        with self._lock:
            has_one_epoch = len(self.epochs) == 1 and not self.moves
            has_one_epoch = has_one_epoch or len(set(self._epochs[slots].tolist())) == 1
            first = self._servers[slots[0]] if len(slots) else _NOBODY
            return first, self._handles[slots], has_one_epoch, self.moves

    def move(self, slot: int, home: Home, to: Home) -> None:
        """The sequence of a slot was moved from one home to another; nothing, if it has left that already."""
        with self._lock:
            if (home.at.epoch, home.handle) == (self._epochs[slot], self._handles[slot]):
                self._servers[slot], self._handles[slot], self._epochs[slot] = to.at, to.handle, to.at.epoch
                self.moves += 1

    def drop(self, slot: int) -> None:
        """Nobody has the sequence of a slot any more."""
        self._dropped.append(slot)

    def ledger(self, span: int) -> Ledger:
        """The ledger of a span."""
        found = self._ledgers.get(span)
        if found is None:
            with self._lock:
                found = self._ledgers.setdefault(span, Ledger(self._lock, self._begins))
        return found

    def _grow(self) -> None:
        before = len(self._handles)
        num_slots = max(_FIRST_SLOTS, 2 * before)
        more = np.zeros(num_slots - before, "<u8")
        self._handles, self._epochs = np.append(self._handles, more), np.append(self._epochs, more)
        self._servers += [_NOBODY] * len(more)
        self._begins = np.append(self._begins, more.astype("<i8"))
        for ledger in self._ledgers.values():
            ledger.grow(num_slots)
        self._free += range(num_slots - 1, before - 1, -1)
