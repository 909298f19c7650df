"""Regions of shared memory: what they are made of, who may use which bytes, when they end."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.adapter_rig import Clock
from rigs.until import until

from deltaline_server.errors import Reason, RequestError
from deltaline_server.memory import regions as regions_module
from deltaline_server.memory.mappings import Mapping, Mappings
from deltaline_server.memory.regions import NONCE_BYTES, Region, Regions

PAGE = mmap.PAGESIZE
F32 = np.dtype(np.float32)


class RecordedPinning:
    """Remembers what is pinned; `fails` makes it refuse."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.calls = 0
        self.fails = False

    def pin(self, memory: NDArray[np.uint8]) -> None:
        self.calls += 1
        if self.fails:
            raise RuntimeError("no")
        self.pinned.append((memory.ctypes.data, memory.nbytes))

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        memory[-1] = 7  # still mapped, or this process ends here
        if self.fails:
            raise RuntimeError("no")
        self.pinned.remove((memory.ctypes.data, memory.nbytes))


def make(limit_bytes: int = 64 * PAGE, clock: Callable[[], float] | None = None, **changes: Any) -> Regions:
    values: dict[str, Any] = {"default_lease_s": 10.0, "max_lease_s": 60.0, "clock": clock or Clock()}
    return Regions(limit_bytes=limit_bytes, **(values | changes))


async def settle(regions: Regions) -> None:
    """Let the event loop drop the results that it still holds, and the regions unmap what nobody refers to."""
    await asyncio.sleep(0)
    regions.reap()
    await reason_of(regions.create(1 << 62, None))  # refused, once nothing is left to unmap


def refusal_of(call: Callable[[], Any]) -> tuple[Reason, str]:
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value.refusal.reason, caught.value.refusal.field


async def reason_of(call: Any) -> Reason:
    with pytest.raises(RequestError) as caught:
        await call
    return caught.value.refusal.reason


def memory_files() -> tuple[int, int]:
    """Regions that this process has open as files, and as mappings."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("memfd:deltaline" in link for link in links), sum("memfd:deltaline" in line for line in maps)


async def no_more_than(before: tuple[int, int]) -> None:
    """Return once there are no more files and mappings than before: a thread that made one may be about to drop it."""
    await until(lambda: all(now <= then for now, then in zip(memory_files(), before, strict=True)))


def mapped_by_name(region: Region) -> mmap.mmap:
    """The region as a client maps it."""
    fd = os.open(region.name, os.O_RDWR)
    mapping = mmap.mmap(fd, len(region.memory))
    os.close(fd)
    return mapping


async def test_a_client_that_opens_the_name_shares_the_memory() -> None:
    regions = make()
    region = await regions.create(2 * PAGE - 5, None)
    theirs = mapped_by_name(region)
    assert (len(region.memory), len(theirs), len(region.nonce)) == (2 * PAGE, 2 * PAGE, NONCE_BYTES)
    assert theirs[:NONCE_BYTES] == region.nonce != bytes(NONCE_BYTES)
    assert not any(theirs[NONCE_BYTES:])
    theirs[64:68] = np.float32(2.5).tobytes()
    assert regions.tensor("hidden", region.id, 64, F32, (1, 1)).item() == 2.5
    region.memory[PAGE] = 9
    assert theirs[PAGE] == 9
    await regions.close()


async def test_nobody_else_may_open_it_and_nobody_can_change_its_size() -> None:
    regions = make()
    region = await regions.create(4 * PAGE, None)
    assert os.stat(region.name).st_mode & 0o777 == 0o600
    fd = os.open(region.name, os.O_RDWR)
    for size in (0, PAGE, 8 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        os.truncate(region.name, 0)
    with pytest.raises(PermissionError):
        os.close(os.open(region.name, os.O_RDWR | os.O_TRUNC))
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)
    region.memory[:] = 1  # every page is there
    await regions.close()


async def test_a_punched_hole_harms_nobody() -> None:
    """A client of the same user may take pages out of the file; the server then sees zeros."""
    libc, c_long = ctypes.CDLL(None, use_errno=True), ctypes.c_long
    regions = make()
    region = await regions.create(4 * PAGE, None)
    region.memory[:] = 1
    fd = os.open(region.name, os.O_RDWR)
    keep_size_punch_hole = 0x03
    assert libc.fallocate(fd, keep_size_punch_hole, c_long(PAGE), c_long(PAGE)) == 0
    os.close(fd)
    assert region.memory.sum() == 3 * PAGE
    region.memory[:] = 2
    assert region.memory.sum() == 8 * PAGE
    await regions.close()


async def test_memory_is_bounded_and_comes_back() -> None:
    regions = make(limit_bytes=8 * PAGE)
    first = await regions.create(5 * PAGE, None)
    assert await reason_of(regions.create(3 * PAGE + 1, None)) is Reason.SHARED_MEMORY_EXHAUSTED
    assert await reason_of(regions.create(2**63, None)) is Reason.SHARED_MEMORY_EXHAUSTED
    second = await regions.create(3 * PAGE, None)
    assert (regions.used_bytes, first.id != second.id) == (8 * PAGE, True)
    regions.release(first.id)
    del first
    third = await regions.create(5 * PAGE, None)
    assert regions.used_bytes == 8 * PAGE
    assert not third.memory[NONCE_BYTES:].any()
    await regions.close()


async def test_the_number_of_regions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "MAX_REGIONS", 3)
    regions = make()
    for _ in range(3):
        await regions.create(1, None)
    assert await reason_of(regions.create(1, None)) is Reason.SHARED_MEMORY_EXHAUSTED
    await regions.close()
    await regions.create(1, None)
    await regions.close()


async def test_bad_sizes_and_leases_are_refused_and_off_is_off() -> None:
    regions = make()
    assert await reason_of(regions.create(0, None)) is Reason.INVALID_REQUEST
    assert await reason_of(regions.create(1, 61.0)) is Reason.INVALID_REQUEST
    assert await reason_of(make(limit_bytes=0).create(1, None)) is Reason.SHARED_MEMORY_OFF
    assert regions.used_bytes == 0


async def test_what_the_host_can_not_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    gc.collect()  # else what other tests left may go in between
    regions, before = make(), memory_files()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert await reason_of(regions.create(1, None)) is Reason.SHARED_MEMORY_EXHAUSTED
    assert regions.used_bytes == 0
    await no_more_than(before)


@pytest.mark.parametrize(
    ("offset", "shape", "field"),
    [
        (1, (1, 1), "hidden.shared.offset"),
        (32, (1, 1), "hidden.shared.offset"),
        (PAGE, (1, 1), "hidden.shared.offset"),
        (0, (PAGE // 4 + 1, 1), "hidden.shared.offset"),
        (PAGE - 64, (17, 1), "hidden.shared.offset"),
        (2**64 - 64, (1, 1), "hidden.shared.offset"),
        (2**64 - 64, (16, 2**31 - 1), "hidden.shared.offset"),
        (0, (2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1), "hidden.shared.offset"),
        (0, (2**31, 2**31), "hidden.shared.offset"),
    ],
)
async def test_a_slice_that_is_not_in_its_region_is_refused(offset: int, shape: tuple[int, ...], field: str) -> None:
    regions = make()
    region, neighbour = await regions.create(PAGE, None), await regions.create(PAGE, None)
    wanted = (Reason.INVALID_SHARED_MEMORY, field)
    assert refusal_of(lambda: regions.tensor("hidden", region.id, offset, F32, shape)) == wanted
    for unknown in (0, region.id ^ 1, 2**64 - 1):
        found = refusal_of(lambda unknown=unknown: regions.tensor("hidden", unknown, 0, F32, (1, 1)))  # type: ignore[misc]
        assert found == (Reason.INVALID_SHARED_MEMORY, "hidden.shared.region")
    assert regions.tensor("hidden", region.id, PAGE - 64, F32, (16, 1)).shape == (16, 1)
    assert not neighbour.memory[NONCE_BYTES:].any()
    await regions.close()


async def test_an_output_slice_has_room_and_leaves_the_input_alone() -> None:
    regions = make()
    region = await regions.create(PAGE, None)
    hidden = regions.tensor("hidden", region.id, 128, F32, (32, 1))

    def refused(offset: int, size: int, needed: int) -> str:
        reason, field = refusal_of(lambda: regions.output("output_slice", region.id, offset, size, needed, hidden))
        assert reason is Reason.INVALID_SHARED_MEMORY
        return field

    assert refused(256, 63, 64) == "output_slice.size_bytes"
    assert refused(0, 256, 192) == "output_slice.offset"
    assert refused(192, 64, 64) == "output_slice.offset"
    assert refused(256, PAGE, 64) == "output_slice.offset"
    assert refused(0, 2**64 - 1, 64) == "output_slice.offset"
    made = regions.output("output_slice", region.id, 0, 256, 128, hidden)  # what is not needed may overlap
    assert (made.region, made.offset, made.memory.nbytes) == (region.id, 0, 128)
    assert regions.output("output_slice", region.id, 256, 0, 0, hidden).memory.nbytes == 0
    await regions.close()


async def test_a_lease_runs_from_the_last_use() -> None:
    clock = Clock()
    regions = make(clock=clock)
    used, idle, longer = [(await regions.create(PAGE, lease_s)).id for lease_s in (None, None, 25.0)]
    for _ in range(3):
        clock.now_s += 6
        regions.tensor("hidden", used, 0, F32, (1, 1))
        await settle(regions)
    assert refusal_of(lambda: regions.tensor("hidden", idle, 0, F32, (1, 1)))[0] is Reason.INVALID_SHARED_MEMORY
    assert regions.used_bytes == 2 * PAGE
    clock.now_s += 9
    await settle(regions)
    assert refusal_of(lambda: regions.tensor("hidden", longer, 0, F32, (1, 1)))[1] == "hidden.shared.region"
    regions.tensor("hidden", used, 0, F32, (1, 1))
    clock.now_s += 10
    await settle(regions)
    assert regions.used_bytes == 0


async def test_released_memory_stays_while_an_array_refers_to_it() -> None:
    pinning = RecordedPinning()
    regions = make(pinning=pinning)
    region = await regions.create(PAGE, None)
    number, name, theirs = region.id, region.name, mapped_by_name(region)
    theirs[64:68] = np.float32(2.5).tobytes()
    array = regions.tensor("hidden", number, 64, F32, (2, 3))[:1].view(np.uint8)
    del region
    regions.release(number)
    regions.release(number)
    await settle(regions)
    with pytest.raises(FileNotFoundError):
        os.readlink(name)
    assert refusal_of(lambda: regions.tensor("hidden", number, 64, F32, (1, 1)))[1] == "hidden.shared.region"
    assert array.view(F32)[0, 0] == 2.5
    assert (regions.used_bytes, len(pinning.pinned)) == (PAGE, 1)
    del array
    gc.collect()
    await settle(regions)
    assert (regions.used_bytes, len(pinning.pinned), pinning.calls) == (0, 0, 1)
    assert theirs[64:68] == np.float32(2.5).tobytes()  # what a client has mapped is its own


async def test_memory_that_outlives_the_server_is_unpinned_before_it_is_unmapped() -> None:
    """Else the next memory at its address, in this process, would count as pinned with the pages of the old one."""
    gc.collect()  # else what other tests left may go in between
    before, pinning = memory_files(), RecordedPinning()
    regions = make(pinning=pinning)
    array = regions.tensor("hidden", (await regions.create(PAGE, None)).id, 0, F32, (2, 3))
    await asyncio.sleep(0)
    await regions.close()
    assert len(pinning.pinned) == 1 and memory_files() == (before[0] + 1, before[1] + 1)
    del array
    gc.collect()
    assert not pinning.pinned
    await no_more_than(before)


async def test_memory_that_can_not_be_unpinned_stays_mapped() -> None:
    gc.collect()  # else what other tests left may go in between
    before, pinning = memory_files(), RecordedPinning()
    regions = make(pinning=pinning)
    regions.release((await regions.create(PAGE, None)).id)
    pinning.fails = True
    await settle(regions)
    assert regions.used_bytes == PAGE and memory_files() == (before[0] + 1, before[1] + 1)


async def test_memory_that_can_not_be_pinned_is_used_as_it_is() -> None:
    pinning = RecordedPinning()
    pinning.fails = True
    regions = make(pinning=pinning)
    region = await regions.create(PAGE, None)
    assert regions.tensor("hidden", region.id, 0, F32, (1, 1)).shape == (1, 1)
    regions.release(region.id)
    del region
    await settle(regions)
    assert (regions.used_bytes, pinning.calls) == (0, 1)


async def test_a_caller_that_leaves_during_the_creation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    regions, before = make(), memory_files()
    is_making, may_go_on, make_mapping = threading.Event(), threading.Event(), Mappings.make

    def held(self: Mappings, size: int) -> Mapping:
        is_making.set()
        assert may_go_on.wait(20)
        return make_mapping(self, size)

    monkeypatch.setattr(Mappings, "make", held)
    task = asyncio.create_task(regions.create(8 * PAGE, None))
    await asyncio.to_thread(is_making.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    may_go_on.set()
    async with asyncio.timeout(20):
        while regions.used_bytes:
            await asyncio.sleep(0.01)
            await settle(regions)
    await no_more_than(before)


async def test_regions_that_come_and_go_leave_no_file_and_no_mapping() -> None:
    regions = make()

    before = memory_files()
    for _ in range(20):
        regions.release((await regions.create(PAGE, None)).id)
    await settle(regions)
    await no_more_than(before)


async def test_anothers_region_is_one_that_never_was() -> None:
    regions = make()
    region = await regions.create(PAGE, None, 1)
    linked = await regions.create(PAGE, None, "link:1000:7")
    hidden = np.zeros(1, np.float32)
    for number, owners in ((region.id, (2, "link:1000:7")), (linked.id, (1, "link:1000:8"))):

        def tensor(number: int, owners: tuple[int, str] = owners) -> object:
            return regions.tensor("hidden", number, 0, F32, (1, 1), owners)

        def output(number: int, owners: tuple[int, str] = owners) -> object:
            return regions.output("output_slice", number, 0, 64, 64, hidden, owners)

        for call in (tensor, output):
            told = []
            for asked in (number, number ^ 1):
                with pytest.raises(RequestError) as refused:
                    call(asked)
                told.append(refused.value.refusal)
            assert told[0] == told[1] and told[0].reason is Reason.INVALID_SHARED_MEMORY
        with pytest.raises(RequestError):
            regions.copy_out(number, 0, 64, owners[0])
        with pytest.raises(RequestError):
            regions.copy_in(number, 0, [b"x"], owners[1])
        regions.release(number, owners)
        assert regions.has(number)
    assert regions.tensor("hidden", region.id, 0, F32, (1, 1), (1, "ipv4:10.0.0.1:5")).shape == (1, 1)
    assert regions.copy_out(linked.id, 0, 4, "link:1000:7") == linked.nonce[:4]
    regions.release(region.id, (1, "ipv4:10.0.0.1:5"))
    assert not regions.has(region.id)
    await regions.close()
