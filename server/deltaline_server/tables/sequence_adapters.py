"""Which adapter the sequence in each slot has, from its opening to its end.

An adapter is a number of the registry's, which means one content forever. Nothing here changes the adapter of a
sequence that lives: its state was made under it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.tables.adapter_registry import AdapterRegistry
from deltaline_server.tables.ledger import Slots

NO_ADAPTER = 0


@dataclass(frozen=True)
class BoundAdapter:
    """An adapter that sequences have: its number, the name that it had when they opened, and its content hash.

    Of sequences without one: NO_ADAPTER, and nothing.
    """

    number: int = NO_ADAPTER
    name: str = ""
    content_hash: bytes = b""


BASE = BoundAdapter()


class SequenceAdapters:
    """The adapter of each slot's sequence. All methods belong to one thread.

    Attributes: number int64 [slots], NO_ADAPTER where there is none; num_bound, the sequences that have one.
    """

    def __init__(self, num_slots: int, registry: AdapterRegistry | None = None) -> None:
        """registry: None where the server keeps no adapters."""
        self.registry = registry
        self.number = np.zeros(num_slots, dtype=np.int64)
        self.num_bound = 0

    def reserve(self, name: str, count: int, principal: Principal = ANONYMOUS) -> BoundAdapter:
        """Bind the adapter of a name for `count` sequences of a principal, no name being none: `put` or `give_back`
        must follow.

        Raises RequestError ADAPTERS_OFF or ADAPTER_UNKNOWN.
        """
        if not name:
            return BASE
        registry = self._checked_registry()
        number = registry.bind(name, count, principal)
        return BoundAdapter(number, name, registry.content(number).content_hash)

    def reserve_again(self, stored: BoundAdapter, principal: Principal) -> BoundAdapter:
        """Bind the adapter whose content a stored state of a principal was made with, for that, as `reserve` does."""
        if not stored.content_hash:
            return BASE
        return replace(stored, number=self._checked_registry().bind_content(stored.content_hash, principal))

    def content_hash(self, name: str, principal: Principal) -> bytes:
        """What an adapter's name means to a principal now, empty for none. Changes nothing; raises as `reserve`."""
        if not name:
            return b""
        registry = self._checked_registry()
        return registry.content(registry.named(name, principal)).content_hash

    def hold(self, adapter: BoundAdapter, count: int = 1) -> None:
        """Reserve an adapter, which another has at this time, for `count` more, as `reserve` does by its name."""
        if adapter.number:
            assert self.registry is not None
            self.registry.hold(adapter.number, count)

    def give_back(self, adapter: BoundAdapter, count: int) -> None:
        """What was reserved is not used after all."""
        if adapter.number:
            assert self.registry is not None
            self.registry.release(adapter.number, count)

    def put(self, slots: Slots, adapter: BoundAdapter) -> None:
        """The sequences that begin in these slots, which have no adapter yet, have what was reserved for them."""
        if adapter.number:
            self.number[slots] = adapter.number
            self.num_bound += len(slots)

    def end(self, slot: int) -> None:
        """The sequence in a slot is over."""
        number = int(self.number[slot])
        if number:
            assert self.registry is not None
            self.number[slot] = NO_ADAPTER
            self.num_bound -= 1
            self.registry.release(number)

    def of(self, slot: int) -> BoundAdapter:
        """The adapter of a slot's sequence."""
        number = int(self.number[slot])
        if not number:
            return BASE
        assert self.registry is not None
        return BoundAdapter(number, self.registry.name(number), self.registry.content(number).content_hash)

    def of_rows(self, slots: Slots) -> NDArray[np.int64] | None:
        """The numbers of many slots, int64 [rows]; None when all are NO_ADAPTER."""
        if not self.num_bound:
            return None
        numbers = self.number.take(slots)
        return numbers if np.count_nonzero(numbers) else None

    def _checked_registry(self) -> AdapterRegistry:
        if self.registry is None:
            message = "this server keeps no adapters: start it with --adapter-bytes"
            raise RequestError(Reason.ADAPTERS_OFF, message, field="adapter")
        return self.registry

    def check_integrity(self, captured: Iterable[BoundAdapter] = ()) -> None:
        """Raise ValueError unless the numbers, their count and the registry's agree. captured: those of states."""
        bound = Counter(self.number[self.number != NO_ADAPTER].tolist())
        if bound.total() != self.num_bound:
            raise ValueError("sequence adapters: the count of sequences with an adapter is wrong")
        bound += Counter(adapter.number for adapter in captured if adapter.number)
        if self.registry is not None:
            self.registry.check_integrity()
            if bound != self.registry.bound():
                raise ValueError("sequence adapters: sequences and the registry disagree")
