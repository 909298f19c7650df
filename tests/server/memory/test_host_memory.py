"""Host memory is pinned as long as a tensor uses it, and unpinned on another thread afterwards."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deltaline_server.memory.pinning import HostMemory


class Recorded:
    """Remembers what is pinned, by address, and which threads unpinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.threads: set[int] = set()
        self.refuses = False

    def pin(self, memory: NDArray[np.uint8]) -> None:
        if self.refuses:
            raise RuntimeError("CUDA error 2")
        assert memory.flags.writeable and memory.ctypes.data % 4096 == 0
        self.pinned[memory.ctypes.data] = memory.nbytes

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        assert int(memory.sum()) > 0  # the pages are still there
        assert self.pinned.pop(memory.ctypes.data) == memory.nbytes
        self.threads.add(threading.get_ident())


def test_memory_is_pinned_until_its_last_part_is_gone() -> None:
    pinning = Recorded()
    memory = HostMemory(pinning)
    given = memory.allocate(10_001)
    other = memory.allocate(5)
    other.fill_(1)
    assert (given.dtype, given.shape, sorted(pinning.pinned.values())) == (torch.uint8, (10_001,), [5, 10_001])
    part = given[64:128].view(torch.float32).view(4, 4)
    part.fill_(3.0)
    assert int(given.sum()) > 0
    del given
    assert part[3, 3] == 3 and len(pinning.pinned) == 2
    del part
    memory.close()
    assert list(pinning.pinned.values()) == [5] and pinning.threads.isdisjoint({threading.get_ident()})
    del other  # after close: on this thread
    assert pinning.pinned == {} and threading.get_ident() in pinning.threads
    memory.close()


def test_memory_that_cannot_be_pinned_is_given_back() -> None:
    pinning = Recorded()
    pinning.refuses = True
    memory = HostMemory(pinning)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        memory.allocate(100)
    with pytest.raises(MemoryError):
        memory.allocate(1 << 60)
    assert pinning.pinned == {}
    memory.close()


def test_where_nothing_is_pinned_memory_is_as_it_comes() -> None:
    memory = HostMemory(None)
    given = memory.allocate(7)
    assert (given.shape, given.dtype) == ((7,), torch.uint8)
    memory.close()


@pytest.mark.gpu
def test_a_device_copies_from_it() -> None:
    from deltaline_server.memory.pinning import CudaPinning

    memory = HostMemory(CudaPinning(torch.device("cuda", torch.cuda.current_device())))
    given = memory.allocate(1 << 20)
    assert given.is_pinned() and given[100:].is_pinned()
    given.copy_(torch.arange(1 << 20) % 251)
    assert torch.equal(given.cuda().cpu(), given)
    del given
    memory.close()
