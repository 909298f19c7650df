"""The file tier: which states lie in files, how many bytes they take together, and which make way.

All methods belong to the event loop; files are written, read and removed in two threads. What fails is a miss that is
counted, never an error of whoever asked.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from deltaline_server.log import event
from deltaline_server.snapshots.directory import StateDirectory, name_of
from deltaline_server.snapshots.header import Flaw, RememberedHeader, StateFileError, StateHeader
from deltaline_server.snapshots.layout import Bytes, Section, StateLayout, state_bytes
from deltaline_server.snapshots.owned_states import OwnedStates
from deltaline_server.snapshots.state_file import file_bytes

T = TypeVar("T")
NUM_THREADS = 2
# A file system may say later ones, which can't be written.
MAX_NS = 1 << 62
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = logging.getLogger(__name__)


class Miss(StrEnum):
    """Why a state was not stored, or is not there."""

    FULL = "full"
    """It is larger than the tier, or all that is there is pinned or in use."""
    NO_SPACE = "no_space"
    """The disk has no room, or the user no more of it."""
    FAILED = "failed"
    """The system can't write or read."""
    BUSY = "busy"
    """The system can't read now, and may later."""
    UNKNOWN = "unknown"
    """It was never stored, or was evicted."""
    DAMAGED = "damaged"
    """Its file is not what was written."""


@dataclass(eq=False)
class StoredFile:
    """A state's file. num_uses: of those that read it now; it is not evicted while there are any."""

    remembered: RememberedHeader
    num_bytes: int
    is_pinned: bool
    num_uses: int = 0

    @property
    def owner(self) -> str:
        return self.remembered.header.owner


@dataclass(frozen=True)
class _Found:
    """What a look through the folder found: states with bytes and time of their last use, others' files with the same,
    and how many had which flaw."""

    states: list[tuple[int, int, RememberedHeader]]
    others: list[tuple[int, int, str]]
    flaws: Counter[Flaw]


class FileTier:
    """States in files of one folder, `limit_bytes` together at most, with those of other fingerprints, which go first.

    num_stored, num_loaded, num_evicted; misses: how often each was answered; flaws: of files that were not accepted.
    """

    def __init__(
        self,
        directory: StateDirectory,
        layout: StateLayout,
        fingerprint: bytes,
        limit_bytes: int,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """directory: which `close` closes. clock_ns: since the epoch, for the order of uses across restarts."""
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self.num_stored = self.num_loaded = self.num_evicted = 0
        self.misses, self.flaws = Counter[Miss](), Counter[Flaw]()
        self.on_evicted: Callable[[bytes], None] = lambda id: None
        """Told of each state that has made way."""
        self._directory, self._layout, self._fingerprint = directory, layout, fingerprint
        self._clock_ns, self._last_ns = clock_ns, 0
        self._files = OwnedStates[StoredFile]()
        # The least recently used first.
        self._others: OrderedDict[str, int] = OrderedDict()
        # Whether each is still wanted: it may be released meanwhile.
        self._writing: dict[bytes, bool] = {}
        self._making_room = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="files")

    async def find_all(self) -> list[StateHeader]:
        """Take what is in the folder from an earlier server; return the states. To be called once, before the rest.

        Raises OSError if the folder can't be read.
        """
        found = await self._in_thread(self._look_through)
        self.flaws.update(found.flaws)
        for num_bytes, used_ns, one in sorted(found.states, key=lambda each: each[1]):
            self._last_ns = min(used_ns, MAX_NS)
            self._files.add(one.header.id, StoredFile(one, num_bytes, one.header.is_pinned))
        self._others.update((name, num_bytes) for num_bytes, _, name in sorted(found.others, key=lambda each: each[1]))
        self.used_bytes = sum(each.num_bytes for each in self._files.values()) + sum(self._others.values())
        await self._lasting(self._make_room(0))
        event(_log, "stored states found", states=len(self._files), bytes=self.used_bytes, others=len(self._others))
        for flaw, count in sorted(found.flaws.items()):
            event(_log, "files passed over", level=logging.WARNING, flaw=flaw, count=count)
        return [each.remembered.header for each in self._files.values()]

    @property
    def num_missed(self) -> dict[str, int]:
        """How often a state was not stored or not read, by the reason."""
        return {miss.value: self.misses[miss] for miss in Miss}

    def find(self, id: bytes) -> StateHeader | None:
        """The header of a state that is there; it does not count as a use."""
        found = self._files.get(id)
        return None if found is None else found.remembered.header

    def has(self, id: bytes) -> bool:
        """Whether a state is there, or on its way."""
        return id in self._files or id in self._writing

    def size_of(self, id: bytes) -> int:
        """Bytes of the file of a state that is there."""
        return self._files[id].num_bytes

    def pin(self, id: bytes, is_pinned: bool) -> None:
        """From now on a state is not evicted, or may be again; one that is not there is passed over. A file keeps what
        it was written with, which counts after a restart."""
        found = self._files.get(id)
        if found is not None:
            found.is_pinned = is_pinned

    async def store(self, header: StateHeader, memory: Bytes) -> Miss | None:
        """Write a state; None once it outlasts the host. memory: uint8 [state_bytes(its sections)], which must not
        change until then, also where the caller is cancelled: this ends when the write has.

        Raises ValueError: a state of this id is there, the fingerprint is another, or memory or progress are not of
        this layout.
        """
        if header.id in self._files or header.id in self._writing:
            raise ValueError("id: expected one that is not stored")
        if header.fingerprint != self._fingerprint:
            raise ValueError("fingerprint: expected that of this server")
        sections = self._layout.sections(header.spans)
        if memory.shape != (state_bytes(sections),):
            raise ValueError(f"memory: expected {state_bytes(sections)} bytes, got shape {list(memory.shape)}")
        self._writing[header.id] = True
        return await self._lasting(self._store(header, sections, memory))

    async def load(self, id: bytes, memory: Bytes) -> Miss | None:
        """Read a state into its memory, uint8 [state_bytes(sections)]; None once it is whole there. It counts as used.

        After a miss the memory is spoilt. Ends when the reading has, also where the caller is cancelled.
        """
        return await self._lasting(self._load(id, memory))

    async def release(self, id: bytes) -> bool:
        """Remove a state, pinned or not; whether it was there. Who reads it reads it to its end, or finds it unknown;
        one that is being written is removed when it has been."""
        if id in self._writing:
            self._writing[id] = False
            return True
        if id not in self._files:
            return False
        await self._lasting(self._remove(name_of(id), self._files.remove(id).num_bytes))
        return True

    async def close(self) -> None:
        """Finish what is under way, and give the folder back. Idempotent."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._executor.shutdown)
        self._directory.close()

    async def _store(self, header: StateHeader, sections: tuple[Section, ...], memory: Bytes) -> Miss | None:
        num_bytes = file_bytes(header, sections)
        try:
            # One at a time, or one would get the room that another has made.
            async with self._making_room:
                if not await self._make_room(num_bytes):
                    return self._missed(Miss.FULL)
                self.used_bytes += num_bytes
            try:
                stored = await self._in_thread(self._directory.write, header, sections, memory, self._now_ns())
            except OSError as error:
                self.used_bytes -= num_bytes
                event(_log, "a state is not stored", level=logging.WARNING, why=error.strerror)
                return self._missed(Miss.NO_SPACE if error.errno in _NO_SPACE else Miss.FAILED)
            self.num_stored += 1
        finally:
            is_wanted = self._writing.pop(header.id)
        if is_wanted:
            self._files.add(header.id, StoredFile(stored.remembered, num_bytes, header.is_pinned))
        else:
            await self._remove(name_of(header.id), num_bytes)
        return None

    async def _load(self, id: bytes, memory: Bytes) -> Miss | None:
        found = self._files.get(id)
        if found is None:
            return self._missed(Miss.UNKNOWN)
        self._files.use(id)
        found.num_uses += 1
        try:
            await self._in_thread(self._directory.read, found.remembered, self._layout, memory, self._now_ns())
        except StateFileError as error:
            return await self._spoilt(id, found, error)
        finally:
            found.num_uses -= 1
        self.num_loaded += 1
        return None

    async def _spoilt(self, id: bytes, found: StoredFile, error: StateFileError) -> Miss:
        """A state could not be read: one whose file is damaged is no more."""
        if self._files.get(id) is not found:  # it was released before its file was opened
            return self._missed(Miss.UNKNOWN)
        event(_log, "a stored state can't be read", level=logging.WARNING, flaw=error.flaw, why=error)
        self.flaws[error.flaw] += 1
        if error.flaw in (Flaw.UNREADABLE, Flaw.BUSY):
            return self._missed(Miss.FAILED if error.flaw is Flaw.UNREADABLE else Miss.BUSY)
        self._files.remove(id)
        await self._remove(name_of(id), found.num_bytes)
        return self._missed(Miss.UNKNOWN if error.flaw is Flaw.GONE else Miss.DAMAGED)

    async def _make_room(self, num_bytes: int) -> bool:
        """Evict until so many more bytes are within the limit; whether they are. Nothing is evicted in vain."""
        over = self.used_bytes + num_bytes - self.limit_bytes
        names: list[tuple[str, int]] = []
        for name, size in self._others.items():
            if over > 0:
                names.append((name, size))
                over -= size
        ids = self._files.victims(over)
        over -= sum(self._files[id].num_bytes for id in ids)
        if over > 0 and num_bytes:
            return False
        for name, _ in names:
            del self._others[name]
        names += [(name_of(id), self._files.remove(id).num_bytes) for id in ids]
        for id in ids:
            self.on_evicted(id)
        for name, size in names:
            await self._remove(name, size)
            self.num_evicted += 1
        return over <= 0 and self.used_bytes + num_bytes <= self.limit_bytes

    async def _remove(self, name: str, num_bytes: int) -> None:
        """Remove a file that the index has no more; one that can't be removed takes its bytes until a restart."""
        try:
            await self._in_thread(self._directory.remove, name)
        except OSError as error:
            event(_log, "a stored state can't be removed", level=logging.WARNING, why=error.strerror)
            return
        self.used_bytes -= num_bytes

    def _now_ns(self) -> int:
        """The time, and always later than before, so that files have an order."""
        self._last_ns = max(self._clock_ns(), self._last_ns + 1)
        return self._last_ns

    def _missed(self, miss: Miss) -> Miss:
        self.misses[miss] += 1
        return miss

    # -- in threads ------------------------------------------------------------------------------------------------

    def _look_through(self) -> _Found:
        directory, found = self._directory, _Found([], [], Counter())
        directory.remove_parts()
        for name in directory.names():
            try:
                stored, used_ns = directory.read_header(name, self._layout, self._fingerprint)
                found.states.append((directory.size(name)[0], used_ns, stored.remembered))
            except StateFileError as error:
                found.flaws[error.flaw] += 1
                if error.flaw is Flaw.FINGERPRINT:
                    with suppress(OSError):
                        found.others.append((*directory.size(name), name))
            except OSError:
                found.flaws[Flaw.UNREADABLE] += 1
        return found

    # -- threads and tasks -----------------------------------------------------------------------------------------

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)

    async def _lasting(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work to its end even if the caller is cancelled, who is told so only then: its memory is in use."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        is_cancelled = False
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError
        return task.result()
