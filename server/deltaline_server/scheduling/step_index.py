"""The step index of one span: which request each step in flight of a slot belongs to, and how far the engine has them.

Arrays by slot, so that a request of many rows enters and leaves with a few vector operations. Which steps are in flight
is the ledger's to say.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltaline_server.tables.ledger import Slots

_INDEX_BITS = 20


class StepIndex:
    """For each slot: its steps in flight, at most max_in_flight consecutive ones.

    in_flight int64 [slots]: batches that the engine has with rows of the slot. not_given int64 [slots]: steps that the
    engine does not have up to their last token.
    """

    def __init__(self, num_slots: int, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        # What every answer of `add` is cut from: no request has more rows than there are slots.
        self._every = np.arange(num_slots)
        self._every.flags.writeable = False
        self._entries = np.zeros((num_slots, max_in_flight), dtype=np.int64)
        self.in_flight = np.zeros(num_slots, dtype=np.int64)
        self.not_given = np.zeros(num_slots, dtype=np.int64)

    def add(self, slots: Slots, steps: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Each slot's next step is a row of request `number`. Returns the rows with none before them to be given."""
        index = self._every[: len(slots)]
        self._entries[slots, steps % self._max_in_flight] = index + (number << _INDEX_BITS)
        before = self.not_given.take(slots)
        self.not_given[slots] = before + 1
        return index[before == 0] if np.count_nonzero(before) else index

    def given(self, slots: Slots, steps: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """The engine has these steps whole. Returns the rows behind them, by request: its number, and positions in its
        admission in ascending order, whatever the order of the slots."""
        left = self.not_given.take(slots) - 1
        self.not_given[slots] = left
        if not np.count_nonzero(left):
            return []
        has_next = left > 0
        entries = np.sort(self._entries[slots[has_next], (steps[has_next] + 1) % self._max_in_flight])
        numbers, index = entries >> _INDEX_BITS, entries & ((1 << _INDEX_BITS) - 1)
        return [(int(number), index[numbers == number]) for number in np.unique(numbers)]

    def entry(self, slot: int, step: int) -> tuple[int, int]:
        """The number of the request that has a step in flight, and the row's position in its admission."""
        return divmod(int(self._entries[slot, step % self._max_in_flight]), 1 << _INDEX_BITS)
