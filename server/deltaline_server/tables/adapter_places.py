"""Which adapter is in which place on the device: who gets a place, who loses one, and which places batches use.

Knows numbers of adapters, places and time; neither the device nor what an adapter is: what copies is passed in. A place
that a batch uses is never given away: the device would read another tenant's adapter. All methods belong to one thread.

Life of a place:  free -> requested -> copied, ready -> acquired by batches, released -> given to another, or cleared
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

# An adapter that was just copied stays for so long before its first batch, seconds. Else two adapters that ask for
# the same place could take it from each other forever.
GRACE_S = 1.0


class Content(Protocol):
    """What a place holds; immutable."""

    @property
    def content_hash(self) -> bytes:
        """Equal for equal contents only."""

    @property
    def rank(self) -> int:
        """The largest of its ranks."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""

    @property
    def num_elsewhere(self) -> int:
        """Modules that it changes and that are not served here."""


class PlaceCopier(Protocol):
    """Writes places on the device. What is asked for a place happens in order, and after the batches before."""

    def copy(self, place: int, content: Content, done: Callable[[bool], None]) -> None:
        """Begin to copy; nothing of what the place held is left then. `done` is called once, on the caller's thread and
        not before this returns: whether it went well."""

    def clear(self, place: int) -> None:
        """Overwrite the place with zeros before anything else is copied to it."""


@dataclass
class _Resident:
    """An adapter that has a place. ready_s: when it was copied, None before; num_batches: that use it and are not over.

    is_leaving: no batch may take it any more, and its place goes to another when the last one is over. is_forgotten:
    the place is cleared then.
    """

    place: int
    ready_s: float | None = None
    num_batches: int = 0
    was_taken: bool = False
    is_leaving: bool = False
    is_forgotten: bool = False


class AdapterPlaces:
    """Places 0 .. num_places - 1. `clock` gives seconds.

    Attributes: on_copied, called with the number of each adapter that batches may use from now on.
    """

    def __init__(self, num_places: int, copier: PlaceCopier, clock: Callable[[], float]) -> None:
        if num_places < 1:
            raise ValueError(f"num_places: expected 1 or more, got {num_places}")
        self.num_places, self.num_copies, self.num_evicted = num_places, 0, 0
        self.on_copied: Callable[[int], None] = lambda number: None
        self._copier, self._clock = copier, clock
        self._free = list(range(num_places - 1, -1, -1))
        # By number of the adapter, the least recently used first.
        self._residents: OrderedDict[int, _Resident] = OrderedDict()
        # Adapters that wait for a place, in the order of their requests.
        self._waiting: OrderedDict[int, Content] = OrderedDict()

    @property
    def num_resident(self) -> int:
        """Adapters that a batch may use."""
        return sum(self.is_ready(number) for number in list(self._residents))  # a scraper's thread may ask

    def is_ready(self, number: int) -> bool:
        """Whether a batch may use the adapter now."""
        resident = self._residents.get(number)
        return resident is not None and resident.ready_s is not None and not resident.is_leaving

    def is_busy(self, number: int) -> bool:
        """Whether the adapter is being copied, or a batch uses it."""
        resident = self._residents.get(number)
        return resident is not None and (resident.ready_s is None or resident.num_batches > 0)

    def request(self, number: int, content: Content) -> bool:
        """Whether the adapter is ready. If not, it waits for a place: ask again, before each batch.

        Numbers are never used again for another content.
        """
        if self.is_ready(number):
            return True
        resident = self._residents.get(number)
        others_wait = len(self._waiting) > (number in self._waiting)
        if resident is not None and resident.is_leaving and not resident.is_forgotten and not others_wait:
            resident.is_leaving = False  # the one that its place was for waits no more
            self.cancel(number)
            return True
        is_new = number not in self._waiting
        if resident is None or resident.is_leaving:
            self._waiting.setdefault(number, content)
        # All that wait are requested again, one after the other; only the first of them looks for a place.
        if is_new or next(iter(self._waiting)) == number:
            self._assign()
        return False

    def acquire(self, number: int, content: Content) -> int | None:
        """The place of an adapter, for a batch that uses it from now on; `release` must follow. None where it is not
        ready: it waits for a place, and the batch has to go without its rows."""
        if not self.request(number, content):
            return None
        resident = self._residents[number]
        resident.num_batches += 1
        resident.was_taken = True
        self._residents.move_to_end(number)
        return resident.place

    def release(self, numbers: Iterable[int]) -> None:
        """A batch that took these adapters is over on the device: each of them as often as it was taken."""
        for number in numbers:
            resident = self._residents.get(number)
            if resident is None or resident.num_batches < 1:
                raise ValueError(f"adapter: expected one that a batch has taken, got {number}")
            resident.num_batches -= 1
            self._settle(number)
        self._assign()

    def cancel(self, number: int) -> None:
        """Nobody needs the adapter now: it waits no longer. In its place it stays."""
        self._waiting.pop(number, None)

    def forget(self, number: int) -> None:
        """The adapter is gone: clear its place, now or when it is no longer busy. Idempotent."""
        self.cancel(number)
        resident = self._residents.get(number)
        if resident is not None:
            resident.is_leaving = resident.is_forgotten = True
            self._settle(number)
        self._assign()

    def _settle(self, number: int) -> None:
        """Take the place of an adapter that leaves, once it is not busy."""
        resident = self._residents[number]
        if not resident.is_leaving or self.is_busy(number):
            return
        del self._residents[number]
        if resident.is_forgotten:
            self._copier.clear(resident.place)
        else:
            self.num_evicted += 1
        self._free.append(resident.place)

    def _assign(self) -> None:
        """Give places to those who wait: free ones, then ones that no batch uses; else let ones in use leave."""
        # One that leaves gets no second place while batches use its first.
        while (number := next((i for i in self._waiting if i not in self._residents), None)) is not None:
            if not self._free:
                victim = self._victim(in_use=False)
                if victim is None:
                    break
                self._residents[victim].is_leaving = True
                self._settle(victim)
            self._begin(number, self._waiting.pop(number))
        num_leaving = sum(resident.is_leaving for resident in self._residents.values())
        for _ in range(len(self._waiting) - num_leaving):
            victim = self._victim(in_use=True)
            if victim is None:
                return
            self._residents[victim].is_leaving = True

    def _victim(self, in_use: bool) -> int | None:
        """The least recently used adapter that may lose its place, among those that batches use or those they don't."""
        now_s = self._clock()
        for number, resident in self._residents.items():
            if resident.ready_s is None or resident.is_leaving or (resident.num_batches > 0) != in_use:
                continue
            if resident.was_taken or now_s - resident.ready_s >= GRACE_S:
                return number
        return None

    def _begin(self, number: int, content: Content) -> None:
        """Copy an adapter into a free place."""
        place = self._free.pop()
        resident = self._residents[number] = _Resident(place)
        self.num_copies += 1

        def done(is_copied: bool) -> None:
            resident.ready_s = self._clock()
            if not is_copied:
                resident.is_leaving = resident.is_forgotten = True
            self._settle(number)
            self._assign()
            if self.is_ready(number):
                self.on_copied(number)

        self._copier.copy(place, content, done)

    def check_integrity(self) -> None:
        """Raise ValueError unless every place is free or has one adapter, and what waits has none that it may use."""
        places = sorted([*self._free, *(resident.place for resident in self._residents.values())])
        if places != list(range(self.num_places)):
            raise ValueError("adapter places: a place is free and taken, taken twice, or lost")
        for number, resident in self._residents.items():
            if resident.num_batches < 0 or (resident.num_batches and resident.ready_s is None):
                raise ValueError("adapter places: a batch uses an adapter that is not there")
            if resident.is_leaving and not self.is_busy(number):
                raise ValueError("adapter places: an adapter that leaves is still there")
            if resident.is_forgotten and not resident.is_leaving:
                raise ValueError("adapter places: an adapter is forgotten and stays")
        if any(self.is_ready(number) for number in self._waiting):
            raise ValueError("adapter places: an adapter waits and is ready")
        if self._waiting.keys() - self._residents.keys() and self._free:
            raise ValueError("adapter places: an adapter waits while a place is free")
