"""The file tier: what is stored, found again, evicted and counted, and that nothing that fails reaches who asked."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rigs.states import FINGERPRINT, GATED_DELTA, LAYOUT, SNAPSHOT, make_header, make_memory

from deltaline_server.snapshots.directory import StateDirectory, name_of
from deltaline_server.snapshots.files import FileTier, Miss
from deltaline_server.snapshots.header import Flaw
from deltaline_server.snapshots.layout import Bytes, SpanProgress, StateLayer
from deltaline_server.snapshots.state_file import file_bytes

MEMORY = make_memory()
SIZE = file_bytes(make_header(), LAYOUT.sections(SNAPSHOT))
OTHER = bytes(32)


@asynccontextmanager
async def opened(folder: Path, limit: int = 10 * SIZE, fingerprint: bytes = FINGERPRINT) -> AsyncIterator[FileTier]:
    """A tier on a folder, which has looked through it; closed and checked afterwards."""
    tier = FileTier(StateDirectory(folder), LAYOUT, fingerprint, limit)
    await tier.find_all()
    yield tier
    await tier.close()
    assert sizes_in(folder) == tier.used_bytes
    StateDirectory(folder).close()  # it was given back


def sizes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".state", ".part"))


async def stored(tier: FileTier, *seeds: int, is_pinned: bool = False) -> None:
    for seed in seeds:
        assert await tier.store(make_header(seed, is_pinned=is_pinned), make_memory(seed=seed)) is None


async def is_whole(tier: FileTier, seed: int) -> bool:
    memory = np.full_like(MEMORY, 0xEE)
    miss = await tier.load(make_header(seed).id, memory)
    assert miss in (None, Miss.UNKNOWN) and (miss is not None or (memory == make_memory(seed=seed)).all())
    return miss is None


async def held(tier: FileTier, *seeds: int) -> list[int]:
    """Those of the seeds whose states are there, without using one."""
    return [seed for seed in seeds if tier.find(make_header(seed).id) is not None]


async def test_states_are_found_again_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path / "states") as tier:
        await stored(tier, 1, 2)
        assert await is_whole(tier, 1) and not await is_whole(tier, 3)
        assert (tier.num_stored, tier.num_loaded, tier.misses) == (2, 1, {Miss.UNKNOWN: 1})
    tier = FileTier(StateDirectory(tmp_path / "states"), LAYOUT, FINGERPRINT, 10 * SIZE)
    assert await tier.find_all() == [make_header(2), make_header(1)]  # that which was used last comes last
    assert await is_whole(tier, 2) and tier.used_bytes == 2 * SIZE
    await tier.close()


async def test_the_order_of_uses_outlasts_a_clock_that_was_set_back(tmp_path: Path) -> None:
    """Else what was used last would be the first to make way after the next restart."""
    for now_ns in (10**18, 10**9, 2 * 10**9):
        clock_ns = partial(int, now_ns)
        tier = FileTier(StateDirectory(tmp_path / "states"), LAYOUT, FINGERPRINT, 10 * SIZE, clock_ns=clock_ns)
        found = await tier.find_all()
        if not found:
            await stored(tier, 1, 2)
        assert await is_whole(tier, 1)
        await stored(tier, 3 + len(found))
        await tier.close()
    assert found == [make_header(2), make_header(3), make_header(1), make_header(6)]


async def test_what_is_known_of_a_file_does_not_grow_with_its_layers(tmp_path: Path) -> None:
    """A state of 32 layers has 128 sections, each with a digest: those are read from the file when they are needed."""
    layout = replace(LAYOUT, layers=tuple(StateLayer(number, 0, GATED_DELTA) for number in range(32)), num_spans=1)
    tier, count = FileTier(StateDirectory(tmp_path / "states"), layout, FINGERPRINT, 1 << 40), 100
    for seed in range(count):
        spans = (SpanProgress(step=1, position=seed),)
        assert await tier.store(make_header(seed, spans), make_memory(layout, spans)) is None
    await tier.close()
    tier = FileTier(StateDirectory(tmp_path / "states"), layout, FINGERPRINT, 1 << 40)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert len(await tier.find_all()) == count
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    await tier.close()
    assert used / count < 8192  # half of it are the sections of the last 16 that were asked for


async def test_the_least_recently_used_make_way(tmp_path: Path) -> None:
    async with opened(tmp_path / "states", 3 * SIZE + 100) as tier:
        await stored(tier, 1, 2, 3)
        assert await is_whole(tier, 1)
        await stored(tier, 4)
        assert await held(tier, 1, 2, 3, 4) == [1, 3, 4]
        tier.pin(make_header(3).id, True)
        await stored(tier, 5)
        assert await held(tier, 1, 3, 4, 5) == [3, 4, 5]
        assert tier.num_evicted == 2 and tier.used_bytes == 3 * SIZE


async def test_who_stores_one_after_another_pushes_out_none_of_who_holds_less(tmp_path: Path) -> None:
    async with opened(tmp_path / "states", 3 * SIZE + 100) as tier:
        await stored(tier, 1)
        for seed in range(2, 8):
            assert await tier.store(make_header(seed, owner="bob"), make_memory(seed=seed)) is None
        assert await held(tier, *range(1, 8)) == [1, 6, 7] and tier.num_evicted == 4
    async with opened(tmp_path / "states", 2 * SIZE) as tier:
        assert await held(tier, 1, 6, 7) == [1, 7], "a start does so too"


async def test_pinned_states_stay_also_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path / "states", 2 * SIZE) as tier:
        await stored(tier, 1, 2, is_pinned=True)
        assert await tier.store(make_header(3), MEMORY) is Miss.FULL
        assert tier.misses == {Miss.FULL: 1}
    async with opened(tmp_path / "states", 2 * SIZE) as tier:
        assert await tier.store(make_header(3), MEMORY) is Miss.FULL
        tier.pin(make_header(1).id, False)
        await stored(tier, 3)
        assert await held(tier, 1, 2, 3) == [2, 3]


async def test_nothing_is_evicted_in_vain(tmp_path: Path) -> None:
    async with opened(tmp_path / "states", 2 * SIZE) as tier:
        await stored(tier, 1)
        await stored(tier, 2, is_pinned=True)
        spans = (SNAPSHOT[0], replace(SNAPSHOT[1], reply_bytes=SIZE))
        assert await tier.store(make_header(3, spans), make_memory(spans=spans)) is Miss.FULL
        assert await held(tier, 1, 2) == [1, 2]


async def test_a_lower_limit_counts_at_the_next_start(tmp_path: Path) -> None:
    async with opened(tmp_path / "states") as tier:
        await stored(tier, 1, 2, 3)
    async with opened(tmp_path / "states", 2 * SIZE) as tier:
        assert await held(tier, 1, 2, 3) == [2, 3]


async def test_states_of_another_fingerprint_are_kept_until_their_room_is_needed(tmp_path: Path) -> None:
    async with opened(tmp_path / "states") as tier:
        await stored(tier, 1, 2)
    async with opened(tmp_path / "states", 3 * SIZE, OTHER) as tier:
        assert tier.flaws == {Flaw.FINGERPRINT: 2} and tier.used_bytes == 2 * SIZE
        assert await tier.load(make_header(1).id, np.empty_like(MEMORY)) is Miss.UNKNOWN
        for seed in (3, 4):
            assert await tier.store(make_header(seed, fingerprint=OTHER), MEMORY) is None
        assert tier.num_evicted == 1
    async with opened(tmp_path / "states") as tier:
        assert await held(tier, 1, 2, 3, 4) == [2] and await is_whole(tier, 2)


async def test_what_is_no_state_is_neither_counted_nor_touched(tmp_path: Path) -> None:
    async with opened(tmp_path / "states") as tier:
        await stored(tier, 1)
    other = tmp_path / "states" / f"{'ab' * 16}.state"
    other.write_bytes(bytes(100))
    tier = FileTier(StateDirectory(tmp_path / "states"), LAYOUT, FINGERPRINT, SIZE)
    await tier.find_all()
    await stored(tier, 2)
    await tier.close()
    assert tier.used_bytes == SIZE and other.read_bytes() == bytes(100) and tier.flaws == {Flaw.FOREIGN: 1}


@pytest.mark.parametrize(
    ("number", "miss"),
    [
        (errno.ENOSPC, Miss.NO_SPACE),
        (errno.EDQUOT, Miss.NO_SPACE),
        (errno.EIO, Miss.FAILED),
        (errno.EROFS, Miss.FAILED),
    ],
)
async def test_a_write_that_fails_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, miss: Miss
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    async with opened(tmp_path / "states") as tier:
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            assert await tier.store(make_header(1), MEMORY) is miss
        assert tier.misses == {miss: 1} and tier.used_bytes == 0
        await stored(tier, 1)  # the id is free


async def test_a_damaged_file_is_a_miss_and_is_gone(tmp_path: Path) -> None:
    async with opened(tmp_path / "states") as tier:
        await stored(tier, 1)
        path = tmp_path / "states" / name_of(make_header(1).id)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert await tier.load(make_header(1).id, np.empty_like(MEMORY)) is Miss.DAMAGED
        assert tier.flaws == {Flaw.DIGEST: 1} and not path.exists() and tier.used_bytes == 0


async def test_a_file_that_was_taken_away_is_unknown(tmp_path: Path) -> None:
    async with opened(tmp_path / "states") as tier:
        await stored(tier, 1)
        os.unlink(tmp_path / "states" / name_of(make_header(1).id))
        assert await tier.load(make_header(1).id, np.empty_like(MEMORY)) is Miss.UNKNOWN
        assert tier.find(make_header(1).id) is None and tier.used_bytes == 0


async def test_a_disk_that_cannot_be_read_keeps_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with opened(tmp_path / "states") as tier:
        await stored(tier, 1)
        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", fail)
            assert await tier.load(make_header(1).id, np.empty_like(MEMORY)) is Miss.FAILED
        assert await is_whole(tier, 1)


async def test_what_does_not_fit_the_layout_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "states") as tier:
        await stored(tier, 1)
        with pytest.raises(ValueError, match="id: expected one that is not stored"):
            await tier.store(make_header(1), MEMORY)
        with pytest.raises(ValueError, match="fingerprint: expected that of this server"):
            await tier.store(make_header(2, fingerprint=OTHER), MEMORY)
        with pytest.raises(ValueError, match=rf"memory: expected {len(MEMORY)} bytes, got shape \[{len(MEMORY) - 1}\]"):
            await tier.store(make_header(2), MEMORY[1:])


class Held:
    """A directory whose writes and reads wait in their thread until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.begun, self._go = asyncio.Event(), threading.Event()
        loop, real = asyncio.get_running_loop(), getattr(StateDirectory, call)

        def wait_and_call(*arguments: object) -> object:
            loop.call_soon_threadsafe(self.begun.set)
            assert self._go.wait(30)
            return real(*arguments)

        monkeypatch.setattr(StateDirectory, call, wait_and_call)

    def let_go(self) -> None:
        self._go.set()


async def test_a_cancelled_store_ends_when_its_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "states") as tier:
        wait = Held(monkeypatch, "write")
        task = asyncio.create_task(tier.store(make_header(1), make_memory(seed=1)))
        await wait.begun.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        wait.let_go()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await is_whole(tier, 1)


async def test_a_state_released_while_it_is_written_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "states") as tier:
        wait = Held(monkeypatch, "write")
        task = asyncio.create_task(tier.store(make_header(1), MEMORY))
        await wait.begun.wait()
        assert await tier.release(make_header(1).id)
        wait.let_go()
        assert await task is None
        assert await held(tier, 1) == [] and tier.used_bytes == 0


async def test_a_state_that_is_read_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "states", 2 * SIZE) as tier:
        await stored(tier, 1, 2)
        assert await is_whole(tier, 1)
        wait = Held(monkeypatch, "read")
        reads = [asyncio.create_task(is_whole(tier, seed)) for seed in (2, 1)]
        await wait.begun.wait()
        assert await tier.store(make_header(3), MEMORY) is Miss.FULL
        wait.let_go()
        assert await asyncio.gather(*reads) == [True, True]
        await stored(tier, 3)


async def test_stores_at_once_stay_within_the_limit(tmp_path: Path) -> None:
    async with opened(tmp_path / "states", 4 * SIZE) as tier:
        largest = 0

        async def store(seed: int) -> Miss | None:
            nonlocal largest
            miss = await tier.store(make_header(seed), make_memory(seed=seed))
            largest = max(largest, tier.used_bytes)
            return miss

        misses = await asyncio.gather(*(store(seed) for seed in range(20)))
        assert largest <= 4 * SIZE and misses.count(None) + misses.count(Miss.FULL) == 20
        kept = await held(tier, *range(20))
        assert len(kept) == 4 and all([await is_whole(tier, seed) for seed in kept])


async def test_no_store_takes_the_room_that_another_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "states", 4 * SIZE) as tier:
        await stored(tier, 1, 2, 3)
        spans = (SNAPSHOT[0], replace(SNAPSHOT[1], reply_bytes=SIZE - 4096))
        wait = Held(monkeypatch, "remove")
        large = asyncio.create_task(tier.store(make_header(4, spans), make_memory(spans=spans)))
        await wait.begun.wait()
        small = asyncio.create_task(tier.store(make_header(5), make_memory(seed=5)))
        await asyncio.sleep(0)
        wait.let_go()
        assert [*await asyncio.gather(large, small)] == [None, None]


async def test_releasing_twice_is_told(tmp_path: Path) -> None:
    async with opened(tmp_path / "states") as tier:
        await stored(tier, 1, is_pinned=True)
        assert [await tier.release(make_header(1).id) for _ in range(2)] == [True, False]
        tier.pin(make_header(1).id, True)


async def test_no_thread_of_the_loop_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, threads = threading.get_ident(), set[int]()

    def record(call: Callable[..., object]) -> Callable[..., object]:
        def recorded(*arguments: object, **keys: object) -> object:
            threads.add(threading.get_ident())
            return call(*arguments, **keys)

        return recorded

    async with opened(tmp_path / "states", 2 * SIZE) as tier:
        for name in ("pwrite", "pread", "preadv", "fsync", "unlink", "rename"):
            monkeypatch.setattr(os, name, record(getattr(os, name)))
        await stored(tier, 1, 2, 3)
        memory: Bytes = np.empty_like(MEMORY)
        assert await tier.load(make_header(3).id, memory) is None
        await tier.release(make_header(3).id)
    assert threads and here not in threads
