"""An arena: blocks of one mapping, handed out and taken back.

A block is free again when no array over it is left: whoever holds one of its arrays holds the block.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64


class _Block:
    """Bytes of the arena: every array over them keeps this object alive, and it keeps the mapping.

    place: where they lie. dropped: is told of it when no array is left; a finalizer of weakref's takes 3 us more.
    """

    def __init__(self, memory: NDArray[np.uint8], place: tuple[int, int], dropped: deque[tuple[int, int]]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory, self._place, self._dropped = memory, place, dropped

    def __del__(self) -> None:
        self._dropped.append(self._place)


class Arena:
    """Hands out arrays in a mapping, each at a multiple of ALIGNMENT. Safe to use from several threads."""

    def __init__(self, mapping: mmap.mmap, begin: int = 0, end: int | None = None) -> None:
        """begin, end: of the part that it hands out, the first a multiple of ALIGNMENT; None for the mapping's end."""
        self._memory: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self._address = _address(self._memory)
        # Free ranges (begin, end), sorted, none touching the next.
        end = len(self._memory) if end is None else end
        self._free: list[tuple[int, int]] = [(begin, end // ALIGNMENT * ALIGNMENT)]
        self._lock = threading.Lock()
        # Filled wherever the last reference to a block is dropped, also inside `empty`: so no lock is taken there.
        self._dropped: deque[tuple[int, int]] = deque()

    @property
    def size(self) -> int:
        """Bytes of the mapping."""
        return len(self._memory)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any] | None:
        """Return an array with whatever the memory holds, None when no free range is large enough.

        The first range that fits is taken. An empty array takes a block too, so that it has an address.
        """
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        size = max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            while self._dropped:
                self._give_back(*self._dropped.popleft())
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= size:
                    self._free[index : index + 1] = [(begin + size, end)] if begin + size < end else []
                    break
            else:
                return None
        block = _Block(self._memory[begin : begin + size], (begin, begin + size), self._dropped)
        array: NDArray[Any] = np.asarray(block)[:num_bytes].view(dtype).reshape(tuple(shape))
        return array

    def offset(self, array: NDArray[Any]) -> int | None:
        """Return where a contiguous array lies in the mapping; None for one elsewhere or at another alignment."""
        if array.base is None:  # it has memory of its own
            return None
        offset = _address(array) - self._address
        inside = offset >= 0 and offset + array.nbytes <= len(self._memory)
        return offset if inside and offset % ALIGNMENT == 0 and array.flags.c_contiguous else None

    def _give_back(self, begin: int, end: int) -> None:
        """Make a range free again, joined with its neighbours."""
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


def _address(array: NDArray[Any]) -> int:
    """Where an array begins in the process's memory."""
    return int(array.__array_interface__["data"][0])


def map_sealed(fd: int, size_bytes: int) -> mmap.mmap:
    """Map a file of the server's. Raises OSError; ValueError unless it is sealed against shrinking under us, and has
    the size."""
    import fcntl  # only Linux has seals

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals != seals or os.fstat(fd).st_size != size_bytes:
        raise ValueError("expected sealed memory of the size that was promised")
    return mmap.mmap(fd, size_bytes)
