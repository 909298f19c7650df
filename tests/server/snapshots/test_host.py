"""The host tier: states keep their places while somebody copies, and the least recently used make way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.states import LAYOUT, SNAPSHOT, make_header, make_memory

from deltaline_server.snapshots.host import Copy, HostTier
from deltaline_server.snapshots.layout import Bytes, SpanProgress, StateLayout
from deltaline_server.snapshots.places import rounded

MEMORY = make_memory()
SIZE = rounded(len(MEMORY))


class Pinned:
    """Remembers what is pinned."""

    def __init__(self) -> None:
        self.memory: NDArray[np.uint8] | None = None
        self.refuses = False

    def pin(self, memory: NDArray[np.uint8]) -> None:
        if self.refuses:
            raise RuntimeError("CUDA error 2")
        assert memory.flags.writeable and memory.ctypes.data % 4096 == 0 and not memory.any()
        self.memory = memory

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        assert memory is self.memory
        self.memory = None


def copies(content: Bytes) -> Copy:
    """What fills a place with this."""

    async def copy_in(memory: Bytes) -> None:
        memory[...] = 0xEE
        await asyncio.sleep(0)
        memory[...] = content

    return copy_in


async def stored(tier: HostTier, *seeds: int) -> None:
    for seed in seeds:
        assert await tier.store(make_header(seed), copies(make_memory(seed=seed)))


async def is_whole(tier: HostTier, seed: int) -> bool:
    async def compare(memory: Bytes) -> None:
        await asyncio.sleep(0)
        assert (memory == make_memory(seed=seed)).all()

    return await tier.load(make_header(seed).id, compare)


async def lose_the_device(memory: Bytes) -> None:
    raise RuntimeError("the device is lost")


def held(tier: HostTier, *seeds: int) -> list[int]:
    return [seed for seed in seeds if tier.find(make_header(seed).id) == make_header(seed)]


@pytest.fixture
def tier() -> Iterator[HostTier]:
    """One with room for three states."""
    made = HostTier(LAYOUT, 3 * SIZE + 100, None)
    yield made
    made.check_integrity()
    made.close()


async def test_states_come_back(tier: HostTier) -> None:
    await stored(tier, 1, 2, 3)
    assert [await is_whole(tier, seed) for seed in (1, 2, 3, 4)] == [True, True, True, False]
    assert (tier.num_stored, tier.num_loaded, tier.used_bytes, tier.limit_bytes) == (3, 3, 3 * SIZE, 3 * SIZE)


async def test_the_least_recently_used_makes_way(tier: HostTier) -> None:
    await stored(tier, 1, 2, 3)
    assert await is_whole(tier, 1)
    await stored(tier, 4)
    assert held(tier, 1, 2, 3, 4) == [1, 3, 4] and tier.num_evicted == 1
    tier.pin(make_header(3).id, True)
    await stored(tier, 5)
    assert held(tier, 1, 3, 4, 5) == [3, 4, 5] and await is_whole(tier, 3)


async def test_who_stores_one_after_another_pushes_out_none_of_who_holds_less(tier: HostTier) -> None:
    await stored(tier, 1)
    for seed in range(2, 8):
        assert await tier.store(make_header(seed, owner="bob"), copies(make_memory(seed=seed)))
    assert await is_whole(tier, 1) and tier.num_evicted == 4
    for seed in (6, 7):
        tier.pin(make_header(seed).id, True)
    await stored(tier, 8)
    assert held(tier, 1, 8) == [8], "there is nothing else"


async def test_a_state_that_finds_no_place_is_not_stored_and_none_makes_way(tier: HostTier) -> None:
    await stored(tier, 1, 2)
    tier.pin(make_header(2).id, True)
    spans = (SNAPSHOT[0], SpanProgress(position=70, reply_bytes=2 * SIZE))
    assert not await tier.store(make_header(3, spans), copies(make_memory(spans=spans)))
    assert held(tier, 1, 2) == [1, 2] and (tier.num_full, tier.num_evicted) == (1, 0)


async def test_several_make_way_for_a_large_one(tier: HostTier) -> None:
    await stored(tier, 1, 2, 3)
    spans = (SNAPSHOT[0], SpanProgress(position=70, reply_bytes=SIZE // 2))
    assert await tier.store(make_header(4, spans), copies(make_memory(spans=spans)))
    assert held(tier, 1, 2, 3) == [3] and await is_whole(tier, 3)


async def test_a_state_in_use_keeps_its_place(tier: HostTier) -> None:
    await stored(tier, 1, 2, 3)
    with tier.use(make_header(1).id) as memory, tier.use(make_header(1).id):
        assert memory is not None
        await stored(tier, 4, 5, 6)
        assert held(tier, 1) == [1] and (memory == make_memory(seed=1)).all()
        assert tier.release(make_header(1).id) and held(tier, 1) == []
        await stored(tier, 7)
        assert (memory == make_memory(seed=1)).all() and tier.used_bytes == 3 * SIZE
        tier.check_integrity()
    assert tier.used_bytes == 2 * SIZE
    await stored(tier, 1)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_copy_that_fails_leaves_nothing(tier: HostTier, is_cancelled: bool) -> None:
    async def fail(memory: Bytes) -> None:
        memory[...] = 1
        raise asyncio.CancelledError if is_cancelled else RuntimeError("the device is lost")

    with pytest.raises(asyncio.CancelledError if is_cancelled else RuntimeError):
        await tier.store(make_header(1), fail)
    assert held(tier, 1) == [] and tier.used_bytes == 0 and tier.num_stored == 0
    await stored(tier, 1)
    with pytest.raises(RuntimeError, match="the device is lost"):
        await tier.load(make_header(1).id, lose_the_device)
    assert tier.num_loaded == 0 and await is_whole(tier, 1)


async def test_nobody_finds_a_state_that_is_being_copied(tier: HostTier) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def wait(memory: Bytes) -> None:
        begun.set()
        await go.wait()
        memory[...] = make_memory(seed=1)

    task = asyncio.create_task(tier.store(make_header(1), wait))
    await begun.wait()
    assert held(tier, 1) == [] and not await is_whole(tier, 1) and tier.used_bytes == SIZE
    with pytest.raises(ValueError, match="id: expected one that is not stored"):
        await tier.store(make_header(1), wait)
    assert tier.release(make_header(1).id)
    go.set()
    await task
    assert held(tier, 1) == [] and tier.used_bytes == 0


async def test_releasing_twice_is_told(tier: HostTier) -> None:
    await stored(tier, 1)
    tier.pin(make_header(1).id, True)
    assert [tier.release(make_header(1).id) for _ in range(2)] == [True, False]


async def test_the_whole_memory_is_pinned_once_until_it_is_closed() -> None:
    pinning = Pinned()
    tier = HostTier(LAYOUT, 2 * SIZE, pinning)
    assert pinning.memory is not None and pinning.memory.nbytes == 2 * SIZE
    await stored(tier, 1, 2, 3)
    tier.close()
    tier.close()
    assert pinning.memory is None
    pinning.refuses = True
    with pytest.raises(MemoryError, match=f"--host-state-bytes: {2 * SIZE} bytes can't be pinned"):
        HostTier(LAYOUT, 2 * SIZE, pinning)


async def test_a_state_without_bytes_has_a_place_too() -> None:
    layout = StateLayout(tuple(layer for layer in LAYOUT.layers if layer.number == 1), 1, 2, 4, 4)
    tier = HostTier(layout, 2 * SIZE, None)
    header = make_header(1, (SpanProgress(),))
    assert await tier.store(header, copies(np.zeros(0, dtype=np.uint8))) and tier.find(header.id) == header
    tier.check_integrity()
    assert tier.release(header.id) and tier.used_bytes == 0


def test_memory_that_the_host_has_not_is_told() -> None:
    with pytest.raises(MemoryError, match=r"--host-state-bytes: .* bytes can't be mapped"):
        HostTier(LAYOUT, 1 << 50, None)
