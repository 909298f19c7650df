"""The adapters of a batch that is being formed or runs: each is taken once, whatever the number of its rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deltaline_server.tables.adapter_registry import AdapterRegistry
from deltaline_server.tables.sequence_adapters import NO_ADAPTER

# In place of a place on the device: the row has no adapter; its adapter is not on the device yet.
NO_PLACE, ABSENT = -1, -2


class BatchAdapters:
    """Takes adapters from the registry for one batch. They are not given to others until `release`."""

    def __init__(self, registry: AdapterRegistry, on_absent: Callable[[], None]) -> None:
        """on_absent: called when an adapter was asked for that is not on the device; it is on its way then."""
        self._registry, self._on_absent = registry, on_absent
        self._places = {NO_ADAPTER: NO_PLACE}

    @property
    def taken(self) -> list[int]:
        """Numbers of the adapters that the batch has."""
        return [number for number, place in self._places.items() if place >= 0]

    def places_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        """Where adapters are on the device, NO_PLACE or ABSENT where they have none, int32 [len(numbers)].

        Asked again, an adapter has the same.
        """
        first = int(numbers[0])
        if np.count_nonzero(numbers == first) == len(numbers):  # a tenant's own request
            return np.full(len(numbers), self._place(first), dtype=np.int32)
        distinct, inverse = np.unique(numbers, return_inverse=True)
        places: NDArray[np.int32] = np.array([self._place(i) for i in distinct.tolist()], dtype=np.int32)[inverse]
        return places

    def release(self) -> None:
        """The batch is over on the device, or came to nothing. To be called once."""
        taken = self.taken
        if taken:
            self._registry.places.release(taken)

    def _place(self, number: int) -> int:
        place = self._places.get(number)
        if place is None:
            taken = self._registry.places.acquire(number, self._registry.content(number))
            place = self._places[number] = ABSENT if taken is None else taken
            if taken is None:
                self._on_absent()
        return place
