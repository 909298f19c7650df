"""The order of each slot's steps: which request each step in flight belongs to, how far the engine has them, and the
places among them that are taken by what is no step.

Arrays by slot, so that a request of many rows enters and leaves with a few vector operations. Which steps are in flight
is the ledger's to say.
"""

from __future__ import annotations

import heapq
from asyncio import Future
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.sequences import SequenceTable

_INDEX_BITS = 20
# Places that are told of in one turn of the event loop: what is done there may take half a millisecond.
_AT_ONCE = 16
# Where a slot has no place that its steps wait behind.
_NO_PLACE = np.iinfo(np.int64).max


class StepIndex:
    """For each slot, on one span: its steps in flight, at most max_in_flight consecutive ones.

    in_flight int64 [slots]: batches that the engine has with rows of the slot. not_given int64 [slots]: steps that the
    engine does not have up to their last token. last_free int64 [slots]: the last step that waits behind no place;
    has_places: whether any waits behind one.
    """

    def __init__(self, num_slots: int, max_in_flight: int) -> None:
        # One more for the last step that is done: it is asked for while a place behind it is not reached.
        self._num_entries = max_in_flight + 1
        # What every answer of `add` is cut from: no request has more rows than there are slots.
        self._every = np.arange(num_slots)
        self._every.flags.writeable = False
        self._entries = np.zeros((num_slots, self._num_entries), dtype=np.int64)
        self.in_flight = np.zeros(num_slots, dtype=np.int64)
        self.not_given = np.zeros(num_slots, dtype=np.int64)
        self.last_free = np.full(num_slots, _NO_PLACE, dtype=np.int64)
        self.has_places = False

    def add(self, slots: Slots, steps: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Each slot's next step is a row of request `number`. Returns the rows with nothing before them that is to be
        given, or reached."""
        index = self._every[: len(slots)]
        self._entries[slots, steps % self._num_entries] = index + (number << _INDEX_BITS)
        before = self.not_given.take(slots)
        self.not_given[slots] = before + 1
        if self.has_places:
            before[steps > self.last_free.take(slots)] = 1
        return index[before == 0] if np.count_nonzero(before) else index

    def given(self, slots: Slots, steps: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """The engine has these steps whole. Returns the rows behind them, by request: its number, and positions in its
        admission in ascending order, whatever the order of the slots."""
        left = self.not_given.take(slots) - 1
        self.not_given[slots] = left
        if not np.count_nonzero(left):
            return []
        has_next = left > 0
        if self.has_places:
            has_next &= steps < self.last_free.take(slots)
        return self._rows(slots[has_next], steps[has_next] + 1)

    def free(self, slots: Slots, last_free: NDArray[np.int64], tail: NDArray[np.int64]) -> list[tuple[int, Slots]]:
        """The slots' steps up to last_free wait behind no place any more. tail int64 [n]: their last steps.

        Returns those that may run, as `given` does.
        """
        before = self.last_free[slots]
        self.last_free[slots] = last_free
        first = tail - self.not_given[slots] + 1
        may_run = (before < first) & (first <= tail) & (first <= last_free)
        return self._rows(slots[may_run], first[may_run])

    def _rows(self, slots: Slots, steps: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """The rows that steps are, by request: its number, and positions in its admission in ascending order."""
        entries = np.sort(self._entries[slots, steps % self._num_entries])
        numbers, index = entries >> _INDEX_BITS, entries & ((1 << _INDEX_BITS) - 1)
        return [(int(number), index[numbers == number]) for number in np.unique(numbers)]

    def entry(self, slot: int, step: int) -> tuple[int, int]:
        """The number of the request that has a step in flight, or the last one that is done, and the row's position in
        its admission. The request of one that is done may have left."""
        return divmod(int(self._entries[slot, step % self._num_entries]), 1 << _INDEX_BITS)


OnReached: TypeAlias = Callable[[set[int]], "Future[Any] | None"]
"""Does what has a place, and returns what the place is kept for, None for nothing."""


@dataclass(eq=False)
class Place:
    """A place in the orders of several slots' steps, behind those that were admitted when it was taken.

    number: of places that were taken before. steps int64 [spans, n]: the last step before it on each of n slots.
    num_left: slots on which it is not reached yet. dropped: slots of which a step before it was refused.
    """

    number: int
    slots: Slots
    steps: NDArray[np.int64]
    on_reached: OnReached
    num_left: int
    dropped: set[int] = field(default_factory=set)

    def last_step(self, slot: int) -> NDArray[np.int64]:
        """The last step of a slot before it, int64 [spans]: a view."""
        steps: NDArray[np.int64] = self.steps[:, int(np.flatnonzero(self.slots == slot)[0])]
        return steps


class Places:
    """Places that were not reached yet, in the order in which they were taken, the same on every slot.

    Steps that come later wait behind them, and run when what has the place is done with it. A place is reached when it
    is on each of its slots: as the first one there, with the steps before it over but for those that were refused, or
    with the sequence gone. What that takes is a comparison of arrays, and work for the slots of which it is news.
    """

    def __init__(
        self,
        table: SequenceTable,
        indexes: Sequence[StepIndex],
        may_run: Callable[[int, int, NDArray[np.int64]], None],
    ) -> None:
        """indexes: of each span. may_run: told of rows that no place is before any more: their span, the number of
        their request, and positions in its admission."""
        self._table, self._indexes, self._may_run = table, indexes, may_run
        self.wake: Callable[[], None] = lambda: None
        """Called when `run` is to be called soon, in another turn of the event loop."""
        self.on_kept: Callable[[], None] = lambda: None
        """Called when a place is kept: what waits behind it may do so for long, with nothing in flight."""
        self.has_any = False
        self._num_taken = self._num_places = 0
        self._of_slot: dict[int, deque[Place]] = {}
        # Slots whose first place is not reached on them, and the last steps before it, which the indexes have by span.
        self._is_awaited = np.zeros(table.num_slots, dtype=np.bool_)
        self._last_free = np.full((len(indexes), table.num_slots), _NO_PLACE, dtype=np.int64)
        for index, last_free in zip(indexes, self._last_free, strict=True):
            index.last_free = last_free
        # Places that are reached, by their numbers: a heap.
        self._reached: list[tuple[int, Place]] = []
        # Those that were kept, and are no more.
        self._left: list[Place] = []

    def take(self, slots: Slots, on_reached: OnReached) -> None:
        """Take a place behind all steps of slots (none twice) that are admitted. `run` finds out whether it is reached.

        on_reached: called once, with the slots of which a step before it was refused; it may not raise. Where it
        returns a future the place is kept until that is done.
        """
        steps = self._table.ledger.tail.step[:, slots]
        place = Place(self._num_taken, slots, steps, on_reached, len(slots))
        self._num_taken += 1
        for i, slot in enumerate(slots.tolist()):
            places = self._of_slot.setdefault(slot, deque())
            places.append(place)
            if len(places) == 1:
                self._last_free[:, slot], self._is_awaited[slot] = steps[:, i], True
        self._count(1)

    def drop(self, span: int, slot: int, step: int) -> None:
        """A step of a slot was refused, and those behind it: so are the places behind it, which are behind the step
        before from then on."""
        for number, place in enumerate(self._of_slot.get(slot, ())):
            last = place.last_step(slot)
            if last[span] >= step:
                place.dropped.add(slot)
                last[span] = step - 1
                if number == 0:
                    self._last_free[span, slot] = step - 1

    def leave(self, slot: int) -> None:
        """The sequence in a slot is over: the steps of the next one there wait behind none of its places."""
        for number, place in enumerate(self._of_slot.pop(slot, ())):
            if number or self._is_awaited[slot]:
                self._reach_on_one(place)
        self._last_free[:, slot], self._is_awaited[slot] = _NO_PLACE, False
        if self._reached:
            self.wake()

    def run(self) -> None:
        """Tell of the places that are reached, and let what waits behind them run; where there are many, of the rest in
        another turn of the event loop."""
        while self._left:
            self._pass(self._left.pop())
        self._find_reached(np.flatnonzero(self._is_awaited))
        for _ in range(_AT_ONCE):
            if not self._reached:
                return
            _, place = heapq.heappop(self._reached)
            kept_for = place.on_reached(place.dropped)
            if kept_for is not None:
                kept_for.add_done_callback(partial(self._leave, place))
                self.on_kept()
                continue
            self._pass(place)
            self._find_reached(place.slots[self._is_awaited[place.slots]])
        if self._reached:
            self.wake()

    def _leave(self, place: Place, _: object) -> None:
        """What a place was kept for is done."""
        self._left.append(place)
        self.wake()

    def _pass(self, place: Place) -> None:
        """What has a place is done with it: let the steps behind it run, up to the next one."""
        self._count(-1)
        slots, last_free = place.slots, np.full(place.steps.shape, _NO_PLACE, dtype=np.int64)
        for i, slot in enumerate(slots.tolist()):
            places = self._of_slot.get(slot)
            if not places or places[0] is not place:  # its sequence has left the slot
                last_free[:, i] = self._last_free[:, slot]
                continue
            places.popleft()
            if not places:
                del self._of_slot[slot]
                continue
            last_free[:, i], self._is_awaited[slot] = places[0].last_step(slot), True
        tail = self._table.ledger.tail.step[:, slots]
        for span, index in enumerate(self._indexes):
            for number, rows in index.free(slots, last_free[span], tail[span]):
                self._may_run(span, number, rows)

    def _find_reached(self, slots: Slots) -> None:
        """Find out which of these slots, which are awaited, have done the steps before their first places."""
        is_over = (self._table.ledger.done.step[:, slots] >= self._last_free[:, slots]).all(axis=0)
        for slot in slots[is_over].tolist():
            self._is_awaited[slot] = False
            self._reach_on_one(self._of_slot[slot][0])

    def _reach_on_one(self, place: Place) -> None:
        """A place is reached on one slot more."""
        place.num_left -= 1
        if not place.num_left:
            heapq.heappush(self._reached, (place.number, place))

    def _count(self, more: int) -> None:
        """There are so many places more."""
        self._num_places += more
        self.has_any = bool(self._num_places)
        for index in self._indexes:
            index.has_places = self.has_any
