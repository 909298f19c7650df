"""The order of each slot's steps: which request each step in flight belongs to, how far the engine has them, and the
places among them that are taken by what is no step.

Arrays by slot, so that a request of many rows enters and leaves with a few vector operations. Which steps are in flight
is the ledger's to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.sequences import SequenceTable

_INDEX_BITS = 20
# Where a slot has no place that its steps wait behind.
_NO_PLACE = np.iinfo(np.int64).max


class StepIndex:
    """For each slot, on one span: its steps in flight, at most max_in_flight consecutive ones.

    in_flight int64 [slots]: batches that the engine has with rows of the slot. not_given int64 [slots]: steps that the
    engine does not have up to their last token. last_free int64 [slots]: the last step that waits behind no place;
    has_places: whether any waits behind one.
    """

    def __init__(self, num_slots: int, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        # What every answer of `add` is cut from: no request has more rows than there are slots.
        self._every = np.arange(num_slots)
        self._every.flags.writeable = False
        self._entries = np.zeros((num_slots, max_in_flight), dtype=np.int64)
        self.in_flight = np.zeros(num_slots, dtype=np.int64)
        self.not_given = np.zeros(num_slots, dtype=np.int64)
        self.last_free = np.full(num_slots, _NO_PLACE, dtype=np.int64)
        self.has_places = False

    def add(self, slots: Slots, steps: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Each slot's next step is a row of request `number`. Returns the rows with nothing before them that is to be
        given, or reached."""
        index = self._every[: len(slots)]
        self._entries[slots, steps % self._max_in_flight] = index + (number << _INDEX_BITS)
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
        entries = np.sort(self._entries[slots, steps % self._max_in_flight])
        numbers, index = entries >> _INDEX_BITS, entries & ((1 << _INDEX_BITS) - 1)
        return [(int(number), index[numbers == number]) for number in np.unique(numbers)]

    def entry(self, slot: int, step: int) -> tuple[int, int]:
        """The number of the request that has a step in flight, and the row's position in its admission."""
        return divmod(int(self._entries[slot, step % self._max_in_flight]), 1 << _INDEX_BITS)


@dataclass(eq=False)
class Place:
    """A place in the orders of several slots' steps, behind those that were admitted when it was taken.

    handles uint64 [n]: of the sequences that had the slots then. steps int64 [spans, n]: the last step before it.
    dropped: slots of which a step before it was refused.
    """

    slots: Slots
    handles: NDArray[np.uint64]
    steps: NDArray[np.int64]
    on_reached: Callable[[set[int]], None]
    dropped: set[int] = field(default_factory=set)

    def last_step(self, slot: int) -> NDArray[np.int64]:
        """The last step of a slot before it, int64 [spans]: a view."""
        steps: NDArray[np.int64] = self.steps[:, int(np.flatnonzero(self.slots == slot)[0])]
        return steps


class Places:
    """Places that were not reached yet, in the order in which they were taken, the same on every slot.

    Steps that come later wait behind them, and run when what has the place is done with it.
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
        self._places: list[Place] = []
        self.has_any = False
        self._of_slot: dict[int, deque[Place]] = {}

    def take(self, slots: Slots, on_reached: Callable[[set[int]], None]) -> None:
        """Take a place behind all steps of slots (none twice) that are admitted. `run` finds out whether it is reached.

        on_reached: called once, with the slots of which a step before it was refused; it may not raise.
        """
        steps = self._table.ledger.tail.step[:, slots]
        place = Place(slots, self._table.handles(slots), steps, on_reached)
        self._places.append(place)
        for i, slot in enumerate(slots.tolist()):
            places = self._of_slot.setdefault(slot, deque())
            places.append(place)
            if len(places) == 1:
                for index, last in zip(self._indexes, steps[:, i].tolist(), strict=True):
                    index.last_free[slot] = last
        self._tell()

    def drop(self, span: int, slot: int, step: int) -> None:
        """A step of a slot was refused, and those behind it: so are the places behind it, which are behind the step
        before from then on."""
        for number, place in enumerate(self._of_slot.get(slot, ())):
            last = place.last_step(slot)
            if last[span] >= step:
                place.dropped.add(slot)
                last[span] = step - 1
                if number == 0:
                    self._indexes[span].last_free[slot] = step - 1

    def leave(self, slot: int) -> None:
        """The sequence in a slot is over: the steps of the next one there wait behind none of its places."""
        if self._of_slot.pop(slot, None) is not None:
            for index in self._indexes:
                index.last_free[slot] = _NO_PLACE

    def run(self) -> None:
        """Tell of the places that are reached, and let what waits behind them run."""
        while (place := next((place for place in self._places if self._is_reached(place)), None)) is not None:
            place.on_reached(place.dropped)
            self._places.remove(place)
            last_free = np.full(place.steps.shape, _NO_PLACE, dtype=np.int64)
            for i, slot in enumerate(place.slots.tolist()):
                places = self._of_slot.get(slot, deque())
                if place not in places:  # its sequence has left the slot
                    last_free[:, i] = [index.last_free[slot] for index in self._indexes]
                    continue
                places.popleft()
                if places:
                    last_free[:, i] = places[0].last_step(slot)
                else:
                    del self._of_slot[slot]
            self._tell()
            tail = self._table.ledger.tail.step[:, place.slots]
            for span, index in enumerate(self._indexes):
                for number, rows in index.free(place.slots, last_free[span], tail[span]):
                    self._may_run(span, number, rows)

    def _is_reached(self, place: Place) -> bool:
        slots = place.slots
        has_left = self._table.handles(slots) != place.handles
        is_over = np.logical_and.reduce(self._table.ledger.done.step[:, slots] >= place.steps)
        return all(
            left or (self._of_slot[slot][0] is place and (over or slot in place.dropped))
            for slot, left, over in zip(slots.tolist(), has_left.tolist(), is_over.tolist(), strict=True)
        )

    def _tell(self) -> None:
        self.has_any = bool(self._places)
        for index in self._indexes:
            index.has_places = self.has_any
