"""Shared-memory regions: memory that the server makes and clients on the same host map, for the tensors of steps.

Knows bytes, leases and bounds; not steps, messages or devices (`Pinning` is told how). Numbers and words never lie in a
region, only elements of tensors: a client that scribbles in its region spoils its own steps. All methods belong to the
event loop; memory is mapped, pinned and unmapped in threads.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import mmap
import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.log import event

ALIGNMENT = 64
NONCE_BYTES = 16
# Each region takes two file descriptors.
MAX_REGIONS = 128

_log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]


class Pinning(Protocol):
    """Makes host memory such that a device copies straight from and to it."""

    def pin(self, memory: Bytes) -> None:
        """Pin the pages. Takes milliseconds per 100 MB. Raises RuntimeError; then they are not pinned."""

    def unpin(self, memory: Bytes) -> None:
        """Undo it. Raises RuntimeError."""


@dataclass(frozen=True)
class OutputMemory:
    """Where a request's outputs go: bytes of a region, uint8 [size], and how the reply names them."""

    region: int
    offset: int
    memory: Bytes


class _Memory:
    """Mapped bytes. Every array over them keeps this object, and so the mapping, alive."""

    def __init__(self, mapped: Bytes) -> None:
        self.__array_interface__ = mapped.__array_interface__


@dataclass(eq=False)
class Region:
    """Memory with a name. memory: uint8 [size], a view that keeps it mapped. deadline_s: end of its lease."""

    id: int
    memory: Bytes
    fd: int
    nonce: bytes
    lease_s: float
    deadline_s: float

    @property
    def name(self) -> str:
        """The file that a client opens: only a process of the same user that sees this one can."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"


class Regions:
    """All regions of a server, `limit_bytes` together; 0 turns them off.

    used_bytes counts a region from its creation until it is unmapped: after its release or the end of its lease, once
    no array refers to it any more. What can't be unpinned is never unmapped: of memory that is mapped there later a
    device would copy the pages that were there before.
    """

    def __init__(
        self,
        *,
        limit_bytes: int,
        default_lease_s: float,
        max_lease_s: float,
        clock: Callable[[], float],
        pinning: Pinning | None = None,
    ) -> None:
        """pinning: None where devices use host memory as it is."""
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self._default_lease_s, self._max_lease_s, self._clock, self._pinning = (
            default_lease_s,
            max_lease_s,
            clock,
            pinning,
        )
        self._regions: dict[int, Region] = {}
        self._num_mapped = 0
        # Filled where the last reference is dropped, on any thread; emptied on the event loop.
        self._unused: deque[tuple[Bytes, bool]] = deque()
        self._stuck: list[Bytes] = []
        self._is_closed = False
        self._unmap_lock = asyncio.Lock()
        self._unmapping: asyncio.Task[None] | None = None

    async def create(self, size_bytes: int, lease_s: float | None) -> Region:
        """Make a region of at least size_bytes.

        Raises: RequestError SHARED_MEMORY_OFF, INVALID_REQUEST, SHARED_MEMORY_EXHAUSTED.
        """
        if not self.limit_bytes:
            raise RequestError(Reason.SHARED_MEMORY_OFF, "this server shares no memory")
        if size_bytes < 1:
            raise RequestError(Reason.INVALID_REQUEST, "size_bytes: must be at least 1", field="size_bytes")
        if lease_s is not None and lease_s > self._max_lease_s:
            limit_ms = round(self._max_lease_s * 1000)
            raise RequestError(
                Reason.INVALID_REQUEST,
                f"lease_ms: must be in 0 .. {limit_ms}, got {lease_s * 1000:.0f}",
                field="lease_ms",
            )
        # Who asks may go away at any time; what was begun is finished.
        await asyncio.shield(asyncio.create_task(self._unmap_unused()))
        size = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.used_bytes + size > self.limit_bytes or self._num_mapped >= MAX_REGIONS:
            used = f"{self.used_bytes} of {self.limit_bytes} bytes and {self._num_mapped} of {MAX_REGIONS} regions"
            raise RequestError(
                Reason.SHARED_MEMORY_EXHAUSTED,
                f"{used} of shared memory are in use, {size} bytes more do not fit",
            )
        self.used_bytes += size
        self._num_mapped += 1
        making = asyncio.create_task(self._make(size, self._default_lease_s if lease_s is None else lease_s))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._abandon)
            raise

    def _abandon(self, making: asyncio.Task[Region]) -> None:
        """Whoever asked for a region has gone before it was made."""
        if not making.cancelled() and making.exception() is None:
            self.release(making.result().id)

    def release(self, number: int) -> None:
        """End a region: no later step may name it. Idempotent."""
        region = self._regions.pop(number, None)
        if region is not None:
            os.close(region.fd)

    def reap(self) -> None:
        """End the regions whose lease ran out, and begin to unmap what nothing refers to any more."""
        now_s = self._clock()
        for number in [number for number, region in self._regions.items() if region.deadline_s <= now_s]:
            event(_log, "shared memory expired", size_bytes=len(self._regions[number].memory))
            self.release(number)
        if self._unused:
            self._unmapping = asyncio.create_task(self._unmap_unused())

    async def close(self) -> None:
        """End all regions. Those that something still refers to stay mapped, and pinned, with it."""
        for number in list(self._regions):
            self.release(number)
        await self._unmap_unused()
        self._is_closed = True
        await self._unmap_unused()  # what came between

    # -- slices ----------------------------------------------------------------------------------------------------

    def tensor(self, field: str, number: int, offset: int, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        """The array of a shape (each dimension 1 or more) at an offset of a region, a view; the lease begins anew.

        field: the tensor's name in errors. Raises: RequestError INVALID_SHARED_MEMORY.
        """
        size = math.prod(map(int, shape)) * dtype.itemsize  # Python integers: the product can't wrap
        array: NDArray[Any] = self._slice(f"{field}.shared", number, offset, size).view(dtype).reshape(tuple(shape))
        return array

    def output(
        self, field: str, number: int, offset: int, size: int, needed: int, hidden: NDArray[Any]
    ) -> OutputMemory:
        """The slice for `needed` bytes of outputs, apart from the request's hidden states; the lease begins anew.

        field: its name in errors. Raises: RequestError INVALID_SHARED_MEMORY.
        """
        memory = self._slice(field, number, offset, size)
        if size < needed:
            raise _invalid(f"{field}.size_bytes", f"must have room for {needed} bytes of outputs, got {size}")
        memory = memory[:needed]
        if np.may_share_memory(memory, hidden):
            raise _invalid(f"{field}.offset", "must not overlap the hidden states")
        return OutputMemory(number, offset, memory)

    def _slice(self, field: str, number: int, offset: int, size: int) -> Bytes:
        region = self._regions.get(number)
        if region is None:
            raise _invalid(f"{field}.region", "is not known here: never made, released, or its lease ran out")
        if offset % ALIGNMENT:
            raise _invalid(f"{field}.offset", f"must be a multiple of {ALIGNMENT}, got {offset}")
        total = len(region.memory)
        if offset + size > total:
            raise _invalid(f"{field}.offset", f"{size} bytes from {offset} end beyond the region's {total}")
        region.deadline_s = self._clock() + region.lease_s
        return region.memory[offset : offset + size]

    # -- memory ----------------------------------------------------------------------------------------------------

    async def _make(self, size: int, lease_s: float) -> Region:
        """Make and keep a region whose bytes are counted already. Raises RequestError SHARED_MEMORY_EXHAUSTED."""
        try:
            mapped, fd = await asyncio.to_thread(_map, size)
        except (OSError, ValueError) as error:
            self._forget(size)
            _log.warning("%d bytes of shared memory can't be had: %s", size, str(error))
            raise RequestError(Reason.SHARED_MEMORY_EXHAUSTED, "the host has no such memory to give") from error
        is_pinned = False
        if self._pinning is not None:
            try:
                await asyncio.to_thread(self._pinning.pin, mapped)
                is_pinned = True
            except RuntimeError as error:  # slower, yet right
                _log.warning("%d bytes of shared memory can't be pinned: %s", size, str(error))
        memory = _Memory(mapped)
        # Runs when no array refers to the memory; `mapped` holds the mapping until then.
        weakref.finalize(memory, self._retire, mapped, is_pinned).atexit = False
        nonce = secrets.token_bytes(NONCE_BYTES)
        mapped[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        number = 0
        while number == 0 or number in self._regions:
            number = secrets.randbits(64)
        region = Region(number, np.asarray(memory), fd, nonce, lease_s, self._clock() + lease_s)
        self._regions[number] = region
        event(_log, "shared memory made", size_bytes=size, used_bytes=self.used_bytes, pinned=is_pinned)
        return region

    def _retire(self, mapped: Bytes, is_pinned: bool) -> None:
        """No array refers to a region any more. Called on any thread; once all is closed nobody else lets it go."""
        if self._is_closed:
            self._let_go([mapped], is_pinned)
        else:
            self._unused.append((mapped, is_pinned))

    async def _unmap_unused(self) -> None:
        """Unpin and unmap what nothing refers to; return when that is done."""
        async with self._unmap_lock:
            while self._unused:
                mapped, is_pinned = self._unused.popleft()
                size, last = len(mapped), [mapped]
                del mapped
                if await asyncio.to_thread(self._let_go, last, is_pinned):
                    self._forget(size)

    def _let_go(self, last: list[Bytes], is_pinned: bool) -> bool:
        """Unpin and unmap the array in `last`, its only reference; tell whether it is. Milliseconds per 100 MB."""
        if is_pinned and self._pinning is not None:
            try:
                self._pinning.unpin(last[0])
            except RuntimeError as error:
                size = len(last[0])
                _log.error("%d bytes of shared memory can't be unpinned and stay mapped: %s", size, str(error))
                self._stuck += last
                return False
        last.clear()
        return True

    def _forget(self, size: int) -> None:
        self.used_bytes -= size
        self._num_mapped -= 1


def _map(size: int) -> tuple[Bytes, int]:
    """Map a new sealed file of `size` zero bytes, all of them present; return them and the file. Raises OSError."""
    fd = os.memfd_create("deltaline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        # What the host can't give shows here, not as a fault of the server's later on.
        os.posix_fallocate(fd, 0, size)
        # Nobody can shrink it under the server's mapping, which would end the process (SIGBUS), nor lift the seals.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except BaseException:
        os.close(fd)
        raise
    return np.frombuffer(mapping, np.uint8), fd


def _invalid(field: str, message: str) -> RequestError:
    return RequestError(Reason.INVALID_SHARED_MEMORY, f"{field}: {message}", field=field)
