"""Mapped memory files: made, pinned, and released when no array refers to them any more."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import weakref
from collections import deque
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_log = logging.getLogger(__name__)


class Pinning(Protocol):
    """Makes host memory such that a device copies straight from and to it."""

    def pin(self, memory: Bytes) -> None:
        """Pin the pages. Takes milliseconds per 100 MB. Raises RuntimeError; then they are not pinned."""

    def unpin(self, memory: Bytes) -> None:
        """Undo it. Raises RuntimeError."""


class Mapping(NamedTuple):
    """Memory uint8 [size], and the file it is of, which is the caller's to close."""

    mapped: Bytes
    fd: int
    is_pinned: bool


class Mappings:
    """Maps memory, and unmaps it once no array refers to it: in `unmap_next`, and after `close` where it is dropped.

    What is pinned is unpinned before: of memory that is mapped at its address later a device would copy the pages that
    were there. So what can't be unpinned stays mapped.
    """

    def __init__(self, pinning: Pinning | None) -> None:
        """pinning: None where devices use host memory as it is."""
        self._pinning = pinning
        # Filled where the last reference is dropped, on any thread.
        self._unused: deque[tuple[Bytes, bool, object]] = deque()
        self._stuck: list[Bytes] = []
        self._is_closed = False

    def make(self, size: int) -> Mapping:
        """Map and pin a new file of `size` zero bytes. Milliseconds per 100 MB. Raises OSError or ValueError."""
        mapped, fd = _map(size)
        is_pinned = False
        if self._pinning is not None:
            try:
                self._pinning.pin(mapped)
                is_pinned = True
            except RuntimeError as error:  # slower, yet right
                _log.warning("%d bytes of shared memory can't be pinned: %s", size, str(error))
        return Mapping(mapped, fd, is_pinned)

    def share(self, mapping: Mapping, owner: object) -> Bytes:
        """The memory as an array, uint8 [size]: once neither it nor a view of it is left, the memory is unused. owner:
        what `unmap_next` tells with it."""
        memory = _Memory(mapping.mapped)
        # `mapped` holds the mapping until then.
        weakref.finalize(memory, self._retire, mapping.mapped, mapping.is_pinned, owner).atexit = False
        return np.asarray(memory)

    @property
    def has_unused(self) -> bool:
        """Whether `unmap_next` has something to do."""
        return bool(self._unused)

    def unmap_next(self) -> tuple[int, object]:
        """Unpin and unmap some unused memory; return its bytes, 0 if it stays, and its owner. Milliseconds per 100
        MB."""
        mapped, is_pinned, owner = self._unused.popleft()
        return len(mapped) if self._unpin(mapped, is_pinned) else 0, owner

    def close(self) -> None:
        """From now on memory is unmapped where its last reference is dropped."""
        self._is_closed = True

    def _retire(self, mapped: Bytes, is_pinned: bool, owner: object) -> None:
        if self._is_closed:
            self._unpin(mapped, is_pinned)
        else:
            self._unused.append((mapped, is_pinned, owner))

    def _unpin(self, mapped: Bytes, is_pinned: bool) -> bool:
        """Unpin memory; whether it may be unmapped, which happens when the caller drops it."""
        if is_pinned and self._pinning is not None:
            try:
                self._pinning.unpin(mapped)
            except RuntimeError as error:
                _log.error("%d bytes of shared memory can't be unpinned and stay mapped: %s", len(mapped), str(error))
                self._stuck.append(mapped)
                return False
        return True


def make_present(memory: Bytes) -> None:
    """Have the host map all pages of memory that nobody has written yet; it stays zero.

    numpy releases the interpreter's lock meanwhile. `mmap` with MAP_POPULATE keeps it, as `madvise` does: for a third
    of a second per GiB and more no other thread would run.
    """
    memory[:: mmap.PAGESIZE] = 0


class _Memory:
    """Mapped bytes. Every array over them keeps this object, and so the mapping, alive."""

    def __init__(self, mapped: Bytes) -> None:
        self.__array_interface__ = mapped.__array_interface__


def _map(size: int) -> tuple[Bytes, int]:
    """Map a new sealed file of `size` zero bytes, all of them present; return them and the file. Raises OSError."""
    fd = os.memfd_create("deltaline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        # What the host can't give shows here, not as a fault of the server's later on.
        os.posix_fallocate(fd, 0, size)
        # Nobody can shrink it under the server's mapping, which would end the process (SIGBUS), nor lift the seals.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED), np.uint8)
    except BaseException:
        os.close(fd)
        raise
    make_present(mapped)
    return mapped, fd
