"""Shared-memory regions: memory that the server makes and clients on the same host map, for the tensors of steps.

Numbers and words never lie in a region, only elements of tensors: a client that scribbles in its region spoils its own
steps. All methods belong to the event loop; memory is mapped, pinned and unmapped in threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltaline.wire import Buffer, write_pieces
from deltaline_server.errors import Reason, RequestError
from deltaline_server.log import event
from deltaline_server.memory.mappings import Bytes, Mappings, Pinning
from deltaline_server.principal import ANONYMOUS, Quotas
from deltaline_server.step import OutputMemory

ALIGNMENT = 64
NONCE_BYTES = 16
# Each region takes two file descriptors.
MAX_REGIONS = 128

Owner: TypeAlias = int | str
"""Whose a region is: a principal's, by its number, or of the link's connections of a peer, by its address."""

BY_DEFAULT: tuple[Owner] = (ANONYMOUS.number,)

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Region:
    """Memory with a name. memory: uint8 [size], a view that keeps it mapped. deadline_s: end of its lease."""

    id: int
    owner: Owner
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
    """Regions, `limit_bytes` together; 0 turns them off. Those of several such are found by each, under any of them.

    used_bytes counts a region from its creation until it is unmapped: after its release or the end of its lease, once
    no array refers to it any more.
    """

    def __init__(
        self,
        *,
        limit_bytes: int,
        default_lease_s: float,
        max_lease_s: float,
        clock: Callable[[], float],
        pinning: Pinning | None = None,
        beside: Regions | None = None,
    ) -> None:
        """pinning: None where devices use host memory as it is. beside: others, with a limit of their own, that steps
        find as well."""
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self._default_lease_s, self._max_lease_s, self._clock = default_lease_s, max_lease_s, clock
        self._mappings = Mappings(pinning)
        self._regions: dict[int, Region] = {} if beside is None else beside._regions
        self._num_mapped = 0
        # Of the regions that each owner has mapped.
        self._sizes: defaultdict[object, list[int]] = defaultdict(list)
        self._unmap_lock = asyncio.Lock()
        self._unmapping: asyncio.Task[None] | None = None

    async def create(
        self,
        size_bytes: int,
        lease_s: float | None,
        owner: Owner = ANONYMOUS.number,
        quotas: Quotas | None = None,
    ) -> Region:
        """Make a region of at least size_bytes; to all but its owner it is one that never was.

        Raises: RequestError SHARED_MEMORY_OFF, INVALID_REQUEST, QUOTA_EXCEEDED, SHARED_MEMORY_EXHAUSTED.
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
        # The caller may be cancelled at any time; what has begun is finished.
        await asyncio.shield(asyncio.create_task(self._unmap_unused()))
        size = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if quotas is not None:
            sizes = self._sizes.get(owner, ())
            quotas.check("regions", len(sizes), 1)
            quotas.check("region_bytes", sum(sizes), size)
        if self.used_bytes + size > self.limit_bytes or self._num_mapped >= MAX_REGIONS:
            used = f"{self.used_bytes} of {self.limit_bytes} bytes and {self._num_mapped} of {MAX_REGIONS} regions"
            raise RequestError(
                Reason.SHARED_MEMORY_EXHAUSTED,
                f"{used} of shared memory are in use, {size} bytes more do not fit",
            )
        self.used_bytes += size
        self._num_mapped += 1
        self._sizes[owner].append(size)
        making = asyncio.create_task(self._make(size, owner, self._default_lease_s if lease_s is None else lease_s))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._abandon)
            raise

    def _abandon(self, making: asyncio.Task[Region]) -> None:
        """Release a region whose caller was cancelled before it was made."""
        if not making.cancelled() and making.exception() is None:
            self.release(making.result().id)

    def has(self, number: int) -> bool:
        """Whether there is such a region."""
        return number in self._regions

    def release(self, number: int, owners: Container[Owner] | None = None) -> None:
        """End a region: no later step may name it. Idempotent. owners: who asks, by either name; None for the server
        itself."""
        region = self._regions.get(number)
        if region is not None and (owners is None or region.owner in owners):
            del self._regions[number]
            os.close(region.fd)

    def reap(self) -> None:
        """End the regions whose lease ran out, and begin to unmap what nothing refers to any more."""
        now_s = self._clock()
        for number in [number for number, region in self._regions.items() if region.deadline_s <= now_s]:
            event(_log, "shared memory expired", size_bytes=len(self._regions[number].memory))
            self.release(number)
        if self._mappings.has_unused:
            self._unmapping = asyncio.create_task(self._unmap_unused())

    async def close(self) -> None:
        """End all regions. Those that something still refers to stay mapped, and pinned, with it."""
        for number in list(self._regions):
            self.release(number)
        await self._unmap_unused()
        self._mappings.close()
        await self._unmap_unused()  # what came between

    # -- slices ----------------------------------------------------------------------------------------------------

    def tensor(
        self,
        field: str,
        number: int,
        offset: int,
        dtype: np.dtype[Any],
        shape: Sequence[int],
        owners: Container[Owner] = BY_DEFAULT,
    ) -> NDArray[Any]:
        """The array of a shape (each dimension 1 or more) at an offset of a region, a view; the lease begins anew.

        field: the tensor's name in errors. owners: who asks, one of whom has to have the region. Raises: RequestError
        INVALID_SHARED_MEMORY.
        """
        size = math.prod(map(int, shape)) * dtype.itemsize  # Python integers: the product can't wrap
        memory = self._slice(f"{field}.shared", number, offset, size, owners)
        array: NDArray[Any] = memory.view(dtype).reshape(tuple(shape))
        return array

    def output(
        self,
        field: str,
        number: int,
        offset: int,
        size: int,
        needed: int,
        hidden: NDArray[Any],
        owners: Container[Owner] = BY_DEFAULT,
    ) -> OutputMemory:
        """The slice for `needed` bytes of outputs, apart from the request's hidden states; the lease begins anew.

        field: its name in errors. owners: as of `tensor`. Raises: RequestError INVALID_SHARED_MEMORY.
        """
        memory = self._slice(field, number, offset, size, owners)
        if size < needed:
            raise _invalid(f"{field}.size_bytes", f"must have room for {needed} bytes of outputs, got {size}")
        memory = memory[:needed]
        if np.may_share_memory(memory, hidden):
            raise _invalid(f"{field}.offset", "must not overlap the hidden states")
        return OutputMemory(number, offset, memory)

    def copy_out(self, number: int, offset: int, size: int, owner: Owner) -> bytes:
        """The bytes of a slice of its owner's. Raises: RequestError INVALID_SHARED_MEMORY."""
        return self._slice("place", number, offset, size, (owner,)).tobytes()

    def view(self, number: int, offset: int, size: int, owner: Owner) -> memoryview:
        """The same, not copied: its owner may write there at any time. Raises as `copy_out`."""
        return self._slice("place", number, offset, size, (owner,)).data

    def copy_in(self, number: int, offset: int, pieces: Sequence[Buffer], owner: Owner) -> None:
        """Write bytes to a slice of its owner's, one piece behind the other. Raises: RequestError
        INVALID_SHARED_MEMORY."""
        write_pieces(pieces, self._slice("place", number, offset, sum(map(len, pieces)), (owner,)))

    def _slice(self, field: str, number: int, offset: int, size: int, owners: Container[Owner]) -> Bytes:
        region = self._regions.get(number)
        if region is None or region.owner not in owners:
            raise _invalid(f"{field}.region", "is not known here: never made, released, or its lease ran out")
        if offset % ALIGNMENT:
            raise _invalid(f"{field}.offset", f"must be a multiple of {ALIGNMENT}, got {offset}")
        total = len(region.memory)
        if offset + size > total:
            raise _invalid(f"{field}.offset", f"{size} bytes from {offset} end beyond the region's {total}")
        region.deadline_s = self._clock() + region.lease_s
        return region.memory[offset : offset + size]

    # -- memory ----------------------------------------------------------------------------------------------------

    async def _make(self, size: int, owner: Owner, lease_s: float) -> Region:
        """Make and keep a region whose bytes are counted already. Raises RequestError SHARED_MEMORY_EXHAUSTED."""
        try:
            mapping = await asyncio.to_thread(self._mappings.make, size)
        except (OSError, ValueError) as error:
            self._forget(size, owner)
            _log.warning("%d bytes of shared memory can't be had: %s", size, str(error))
            raise RequestError(Reason.SHARED_MEMORY_EXHAUSTED, "the host has no such memory to give") from error
        memory, nonce = self._mappings.share(mapping, owner), secrets.token_bytes(NONCE_BYTES)
        memory[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        number = 0
        while number == 0 or number in self._regions:
            number = secrets.randbits(64)
        region = Region(number, owner, memory, mapping.fd, nonce, lease_s, self._clock() + lease_s)
        self._regions[number] = region
        event(_log, "shared memory made", size_bytes=size, used_bytes=self.used_bytes, pinned=mapping.is_pinned)
        return region

    async def _unmap_unused(self) -> None:
        """Unpin and unmap what nothing refers to; return when that is done."""
        async with self._unmap_lock:
            while self._mappings.has_unused:
                size, owner = await asyncio.to_thread(self._mappings.unmap_next)
                if size:
                    self._forget(size, owner)

    def _forget(self, size: int, owner: object) -> None:
        self.used_bytes -= size
        self._num_mapped -= 1
        sizes = self._sizes[owner]
        sizes.remove(size)
        if not sizes:
            del self._sizes[owner]


def _invalid(field: str, message: str) -> RequestError:
    return RequestError(Reason.INVALID_SHARED_MEMORY, f"{field}: {message}", field=field)
