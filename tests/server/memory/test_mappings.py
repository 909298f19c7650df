"""Memory is mapped with all of its pages present, while other threads run."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable

import pytest
from rigs.states import LAYOUT

from deltaline_server.memory.mappings import Bytes, Mappings
from deltaline_server.snapshots.host import HostTier

TRIES = 5


def make_region(size: int) -> Bytes:
    mapping = Mappings(None).make(size)
    os.close(mapping.fd)
    return mapping.mapped


class Pinned(list[Bytes]):
    """What is pinned."""

    def pin(self, memory: Bytes) -> None:
        self.append(memory)

    def unpin(self, memory: Bytes) -> None:
        self.remove(memory)


def make_tier(size: int) -> Bytes:
    pinned = Pinned()
    HostTier(LAYOUT, size, pinned)
    return pinned[0]


def longest_gap_s(do: Callable[[], object]) -> float:
    """How long another thread, which sleeps for a millisecond at a time, did not run while something was done."""
    longest, is_over, runs = 0.0, threading.Event(), threading.Event()

    def run() -> None:
        nonlocal longest
        last = time.monotonic()
        while not is_over.is_set():
            runs.set()
            time.sleep(1e-3)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=run)
    thread.start()
    runs.wait()
    try:
        do()
    finally:
        is_over.set()
        thread.join()
    return longest


@pytest.mark.alone
@pytest.mark.parametrize("make", [make_region, make_tier])
def test_other_threads_run_while_memory_is_mapped(make: Callable[[int], Bytes]) -> None:
    """With the lock held every try would take longer; without it one is enough: others may be in the way."""
    assert any(longest_gap_s(lambda: make(512 << 20)) < 0.1 for _ in range(TRIES))


@pytest.mark.parametrize("make", [make_region, make_tier])
def test_all_pages_are_there(make: Callable[[int], Bytes]) -> None:
    size = 32 << 20
    memory = make(size)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[::4096].max()
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < size // 4096 // 10
