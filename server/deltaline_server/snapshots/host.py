"""The host tier: states in pinned memory of the host, in the bytes that files have too.

All methods belong to the event loop. How bytes come from a device and go to it is the caller's: it hands in the copy,
and its state's place stays until that is done.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from deltaline_server.errors import Reason, RequestError
from deltaline_server.log import event
from deltaline_server.memory.mappings import Pinning, make_present
from deltaline_server.snapshots.header import StateHeader
from deltaline_server.snapshots.layout import Bytes, StateLayout, state_bytes
from deltaline_server.snapshots.owned_states import OwnedStates
from deltaline_server.snapshots.places import Places, rounded

Copy: TypeAlias = Callable[[Bytes], Awaitable[None]]
"""Copies a state into memory uint8 [n], or out of it, and is done once the last byte is there."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class HostState:
    """A state in host memory. num_uses: of those that copy from it now; it keeps its place while there are any."""

    header: StateHeader
    offset: int
    memory: Bytes
    is_pinned: bool
    num_uses: int = 0

    @property
    def owner(self) -> str:
        return self.header.owner

    @property
    def num_bytes(self) -> int:
        """Of its place."""
        return rounded(max(len(self.memory), 1))


class HostTier:
    """States in one piece of memory of `limit_bytes`, each in a place of its own; who makes way OwnedStates tells.

    num_stored, num_loaded, num_evicted, num_full: how often each happened; full: a state found no place.
    """

    def __init__(self, layout: StateLayout, limit_bytes: int, pinning: Pinning | None) -> None:
        """Map and pin the memory: takes milliseconds per 100 MB. pinning: None where devices use host memory as it is.

        Raises MemoryError where the host has not so much, or it can't be pinned.
        """
        self._layout, self._pinning = layout, pinning
        self._places = Places(limit_bytes)
        self.num_stored = self.num_loaded = self.num_evicted = self.num_full = 0
        self.on_evicted: Callable[[bytes], None] = lambda id: None
        """Told of each state that has made way."""
        self._states = OwnedStates[HostState]()
        self._writing: dict[bytes, bool] = {}
        # States that were released while somebody copied from them.
        self._leaving: list[HostState] = []
        self._memory = _map(self._places.num_bytes)
        try:
            if pinning is not None:
                pinning.pin(self._memory)
        except RuntimeError as error:
            raise MemoryError(f"--host-state-bytes: {limit_bytes} bytes can't be pinned") from error

    @property
    def limit_bytes(self) -> int:
        """Bytes for states, whole granules."""
        return self._places.num_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the places of states, those under way among them."""
        return self._places.used_bytes

    @property
    def pinned_bytes(self) -> Counter[str]:
        """Bytes of the states that are pinned here, by their owner's name."""
        pinned = Counter[str]()
        for each in self._states.values():
            pinned[each.owner] += each.is_pinned * len(each.memory)
        return pinned

    @property
    def num_missed(self) -> dict[str, int]:
        """How often a state was not stored, by the reason."""
        return {"full": self.num_full}

    def find(self, id: bytes) -> StateHeader | None:
        """The header of a state that is there; it does not count as a use."""
        found = self._states.get(id)
        return None if found is None else found.header

    def size_of(self, id: bytes) -> int:
        """Bytes of a state that is there."""
        return len(self._states[id].memory)

    def pin(self, id: bytes, is_pinned: bool) -> None:
        """From now on a state is not evicted, or may be again; one that is not there is passed over."""
        found = self._states.get(id)
        if found is not None:
            found.is_pinned = is_pinned

    def needed_bytes(self, header: StateHeader) -> int:
        """Bytes of a state here. Raises ValueError: the progress is none of this layout."""
        return state_bytes(header.sections(self._layout))

    async def store(self, header: StateHeader, copy_in: Copy) -> bool:
        """Let `copy_in` fill a place; whether there was one. Until it is done nobody finds the state.

        What `copy_in` raises is raised, and the place is free then: it has to have ended, also where it is cancelled.
        Raises ValueError: a state of this id is there, or the progress is none of this layout.
        """
        if header.id in self._states or header.id in self._writing:
            raise ValueError("id: expected one that is not stored")
        size = self.needed_bytes(header)
        offset = self._take(max(size, 1))
        if offset is None:
            self.num_full += 1
            return False
        self._writing[header.id] = True
        memory, is_whole = self._memory[offset : offset + size], False
        try:
            await copy_in(memory)
            is_whole = True
        finally:
            is_wanted = self._writing.pop(header.id)
            if is_whole and is_wanted:
                self._states.add(header.id, HostState(header, offset, memory, header.is_pinned))
                self.num_stored += 1
            else:
                self._places.give_back(offset)
        return True

    async def load(self, id: bytes, copy_out: Copy) -> bool:
        """Let `copy_out` read a state; whether it was there. It counts as used. What `copy_out` raises is raised."""
        with self.use(id) as memory:
            if memory is None:
                return False
            await copy_out(memory)
        self.num_loaded += 1
        return True

    @contextmanager
    def use(self, id: bytes) -> Iterator[Bytes | None]:
        """The memory of a state, which keeps its place inside the context; None where it is not there."""
        found = self._states.get(id)
        if found is None:
            yield None
            return
        self._states.use(id)
        found.num_uses += 1
        try:
            yield found.memory
        finally:
            found.num_uses -= 1
            if not found.num_uses and found in self._leaving:
                self._leaving.remove(found)
                self._places.give_back(found.offset)

    def release(self, id: bytes) -> bool:
        """Remove a state, pinned or not; whether it was there, or on its way. Who copies from it does so to the end."""
        if id in self._writing:
            self._writing[id] = False
            return True
        if id not in self._states:
            return False
        found = self._states.remove(id)
        if found.num_uses:
            self._leaving.append(found)
        else:
            self._places.give_back(found.offset)
        return True

    def no_room(self, num_bytes: int) -> RequestError:
        """What is told of a state of so many bytes, 0 where that is not known, that found no place."""
        retry_after_s = 1.0 if num_bytes <= self.limit_bytes else None
        has = f"host memory, of {self.limit_bytes} bytes, has no room for the state now"
        message = f"{has}: --host-state-bytes is what it has"
        return RequestError(Reason.NO_SNAPSHOT_LINES, message, retry_after_s=retry_after_s)

    def close(self) -> None:
        """Forget all states and unpin the memory. Nothing may be under way. Idempotent."""
        self._states = OwnedStates[HostState]()
        if self._pinning is None:
            return
        pinning, self._pinning = self._pinning, None
        try:
            pinning.unpin(self._memory)
        except RuntimeError as error:
            event(_log, "the host tier can't be unpinned", level=logging.ERROR, why=error)

    def check_integrity(self) -> None:
        """Raise ValueError unless every state has a place of its own, and every place is of a state."""
        self._places.check_integrity()
        held = [*self._states.values(), *self._leaving]
        taken = sum(each.num_bytes for each in held)
        if len({each.offset for each in held}) != len(held) or (not self._writing and taken != self.used_bytes):
            raise ValueError("host tier: a place is of two states, or of none")

    def _take(self, size: int) -> int | None:
        """Take a place; states make way for it, unless all that may are too small together."""
        offset = self._places.take(size)
        while offset is None:
            needed = rounded(size) - (self.limit_bytes - self.used_bytes)
            # Where there is as much, what is held lies between what is free.
            victims = self._states.victims(max(needed, 1))
            if not victims or sum(self._states[id].num_bytes for id in victims) < needed:
                return None
            for id in victims:
                self._places.give_back(self._states.remove(id).offset)
                self.num_evicted += 1
                self.on_evicted(id)
            offset = self._places.take(size)
        return offset


def _map(num_bytes: int) -> Bytes:
    """Memory of whole pages, all of them present. Raises MemoryError."""
    try:
        pages = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"--host-state-bytes: {num_bytes} bytes can't be mapped") from error
    memory = np.frombuffer(pages, dtype=np.uint8)
    make_present(memory)
    return memory
