"""Snapshots that lay in host memory or in files, also of a server that is gone, go on bitwise; what is lost is told."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from rigs.exchanged_states import exported
from rigs.scheduler_rig import refuses, turns
from rigs.stored_states import (
    KEY,
    MODELS,
    PREFILL,
    Sequence,
    captured,
    described,
    leave_host,
    make_rig,
    opened,
    prefilled,
    pushed_out,
    restored,
    settled,
)

from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS
from deltaline_server.snapshots.directory import StateDirectory
from deltaline_server.snapshots.files import Miss
from deltaline_server.step import RowWaypoints
from deltaline_server.tables.captured.snapshot import SnapshotState
from deltaline_server.tables.prefixes.cost import ReusePolicy, Tier
from deltaline_server.tables.prefixes.keys import PrefixKeys


@pytest.mark.parametrize("accepted", [None, 2], ids=["plain", "after a verify"])
@pytest.mark.parametrize("tier", ["host", "file", "restart"])
@pytest.mark.parametrize("name", MODELS)
async def test_a_snapshot_goes_on_bitwise_from_every_tier(
    name: str, tier: str, accepted: int | None, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path, name, files=tier != "host")
    parent = await prefilled(rig)
    if accepted is not None:
        await parent.verified(accepted)
    made = await captured(parent, keys=[KEY])
    expected = await parent.goes_on()
    rig.table.close(rig.table.server_epoch, np.array([parent.handle], dtype=np.uint64))
    await settled(rig)
    await pushed_out(rig)
    assert described(rig, made).tier is Tier.HOST
    if tier != "host":
        await leave_host(rig, made.id)
        assert described(rig, made).tier is Tier.FILE
    if tier == "restart":
        await rig.close()
        rig = make_rig(tmp_path, name, files=True)
        await rig.states.find_stored(lambda name: 0 if name == "anonymous" else None)
        again = described(rig, made)
        assert (again.position, again.tier, again.created) == (made.position, Tier.FILE, made.created)
    rig.snapshots.check_integrity()
    keys = PrefixKeys.of([KEY], [made.position], made.position + 1)
    match = rig.states.find(keys, b"", ANONYMOUS, ReusePolicy.ALWAYS)
    assert match.prefix is not None and match.prefix.snapshot == made.id and match.restore_s > 0
    for child in await restored(rig, made, 2):
        for one, other in zip(await child.goes_on(), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert described(rig, made).tier is Tier.DEVICE
    rig.snapshots.check_integrity()
    await rig.close()


@pytest.mark.parametrize("name", MODELS)
async def test_a_waypoint_goes_on_bitwise_from_host_memory(name: str, tmp_path: Path) -> None:
    """Of two, one within a page; an open with its key is told where it lay."""
    rig = make_rig(tmp_path, name)
    parent = await prefilled(rig, 7)
    await parent.step(PREFILL, 80, waypoints=RowWaypoints((64,), at_end=True, keys={71: KEY, 87: b"e" * 16}))
    made = {one.position: one for one in rig.snapshots.describe(ANONYMOUS)[0]}
    assert sorted(made) == [71, 87]
    [here] = await restored(rig, made[71])
    expected = await here.goes_on()
    gone = np.array([parent.handle, here.handle], dtype=np.uint64)
    rig.table.close(rig.table.server_epoch, gone)
    await settled(rig)
    await pushed_out(rig)
    assert {described(rig, one).tier for one in made.values()} == {Tier.HOST}
    keys, opens = PrefixKeys.of([KEY], [71], 72), rig.table.open
    async with rig.states.near_found(keys, b"", ANONYMOUS, ReusePolicy.ALWAYS) as found:
        again = rig.states.open(found, keys, b"", ANONYMOUS, count=1, lease_s=1e3, otherwise=lambda: opens(1))
    assert again.match is found and found.prefix is not None
    assert (found.prefix.snapshot, found.prefix.tier, rig.snapshots.hits) == (made[71].id, Tier.HOST, {Tier.HOST: 1})
    assert described(rig, made[71]).tier is Tier.DEVICE
    for one, other in zip(await Sequence(rig, int(again.handles[0]), 71).goes_on(), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    rig.snapshots.check_integrity()
    await rig.close()


async def test_what_is_released_while_it_is_copied_keeps_its_line_until_then(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    first = await prefilled(rig)
    made = await captured(first)
    rig.engine.eager = False  # no copy ends
    await turns(3)
    rig.table.close(rig.table.server_epoch, np.array([first.handle], dtype=np.uint64))
    # Its line stays when it is released while it is copied.
    num_used = rig.lines.num_used
    assert rig.snapshots.release([made.id], ANONYMOUS) == [SnapshotState.RELEASED]
    rig.snapshots.check_integrity()
    assert rig.lines.num_used == num_used
    rig.engine.run()
    rig.engine.eager = True
    await settled(rig)
    rig.snapshots.check_integrity()
    assert rig.lines.num_used == num_used - 1
    assert rig.tiers.host is not None and rig.tiers.host.used_bytes == 0


async def test_what_is_not_stored_yet_is_over_when_it_gives_way(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    parents = [await prefilled(rig) for _ in range(5)]
    rig.engine.eager = False  # no copy ends
    made = []
    for parent in parents:
        making = asyncio.ensure_future(captured(parent))
        await turns(3)
        made.append(await making)
    # Of one that is being copied the line is not counted, and both lines of snapshots may be had.
    states = rig.snapshots.renew([one.id for one in made], ANONYMOUS, lease_s=None)
    assert states[0] is SnapshotState.HELD and sorted(states)[:3] == [SnapshotState.HELD] * 3
    assert states.count(SnapshotState.EVICTED) == 2
    rig.engine.run()
    rig.engine.eager = True
    await settled(rig)
    rig.snapshots.check_integrity()
    assert rig.lines.num_freezable == 0
    tiers = Counter(described(rig, one).tier for one, state in zip(made, states, strict=True) if state == 1)
    assert tiers == {Tier.HOST: 1, Tier.DEVICE: 2}
    await rig.close()


async def test_pinned_ones_are_stored_and_stay_on_the_device(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, files=True)
    made = await captured(await prefilled(rig), is_pinned=True)
    await settled(rig)
    await captured(await prefilled(rig))
    await captured(await prefilled(rig))
    assert described(rig, made).tier is Tier.DEVICE
    assert rig.tiers.files is not None and rig.tiers.files.has(made.id)
    await rig.close()


async def test_a_damaged_file_is_lost_and_told(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, files=True)
    made = await captured(await prefilled(rig))
    await settled(rig)
    await pushed_out(rig)
    await leave_host(rig, made.id)
    path = tmp_path / "states" / f"{made.id.hex()}.state"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with refuses(Reason.SNAPSHOT_UNKNOWN) as caught:
        await restored(rig, made)
    assert caught.value.refusal.metadata == {"state": "LOST"}
    assert rig.moves is not None and rig.moves.num_lost == 1
    assert rig.snapshots.renew([made.id], ANONYMOUS, lease_s=None) == [SnapshotState.LOST]
    rig.snapshots.check_integrity()
    await rig.close()
    assert not path.exists()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM], ids=os.strerror)
async def test_a_file_that_can_t_be_read_now_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    rig = make_rig(tmp_path, files=True)
    made = await captured(await prefilled(rig))
    await settled(rig)
    await pushed_out(rig)
    await leave_host(rig, made.id)

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with refuses(Reason.NO_SNAPSHOT_LINES):
            await restored(rig, made)
    assert rig.moves is not None and rig.moves.num_lost == 0
    await restored(rig, made)
    rig.snapshots.check_integrity()
    await rig.close()


async def test_a_prompt_whose_file_is_damaged_begins_with_nothing(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, files=True)
    made = await captured(await prefilled(rig), keys=[KEY])
    await settled(rig)
    await pushed_out(rig)
    await leave_host(rig, made.id)
    (tmp_path / "states" / f"{made.id.hex()}.state").write_bytes(b"")
    async with rig.states.near_found(
        PrefixKeys.of([KEY], [made.position], made.position + 1), b"", ANONYMOUS, ReusePolicy.ALWAYS
    ) as found:
        assert found.prefix is None
    assert rig.snapshots.renew([made.id], ANONYMOUS, lease_s=None) == [SnapshotState.LOST]
    await rig.close()


async def test_a_full_disk_is_a_miss_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(tmp_path, files=True)

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(StateDirectory, "write", full)
    made = await captured(await prefilled(rig))
    await settled(rig)
    await pushed_out(rig)
    assert rig.tiers.files is not None and rig.tiers.files.misses[Miss.NO_SPACE] == 3
    assert described(rig, made).tier is Tier.HOST
    await leave_host(rig, made.id)
    assert rig.snapshots.renew([made.id], ANONYMOUS, lease_s=None) == [SnapshotState.EVICTED]
    rig.snapshots.check_integrity()
    await rig.close()


async def test_host_memory_that_is_full_lets_the_oldest_go(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, host_bytes=100_000)
    assert rig.tiers.host is not None
    made = [await captured(await prefilled(rig)) for _ in range(1)]
    while not rig.tiers.host.num_evicted:
        other = await prefilled(rig)
        made.append(await captured(other))
        rig.table.close(rig.table.server_epoch, np.array([other.handle], dtype=np.uint64))
        await settled(rig)
        rig.snapshots.check_integrity()
    states = rig.snapshots.renew([one.id for one in made], ANONYMOUS, lease_s=None)
    assert states == [SnapshotState.EVICTED, *[SnapshotState.HELD] * (len(made) - 1)] and len(made) > 3
    await rig.close()


async def test_a_file_that_is_larger_than_host_memory_is_never_brought_back(tmp_path: Path) -> None:
    """As an earlier server with more of it has left it; who asks is not told to come again, and a prompt that begins
    with it opens without."""
    rig = make_rig(tmp_path, files=True)
    made = await captured(await prefilled(rig), keys=[KEY])
    await settled(rig)
    await rig.close()
    rig = make_rig(tmp_path, files=True, host_bytes=4096)
    await rig.states.find_stored(lambda name: 0)
    with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
        await restored(rig, made)
    assert caught.value.refusal.retry_after_s is None and "--host-state-bytes" in str(caught.value)
    keys = PrefixKeys.of([KEY], [made.position], made.position + 1)
    assert rig.states.find(keys, b"", ANONYMOUS, ReusePolicy.ALWAYS).prefix is None
    await rig.close()


async def test_those_who_want_the_same_wait_for_one_copy(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    made = await captured(await prefilled(rig))
    await settled(rig)
    await pushed_out(rig)
    rig.engine.eager = False
    waiting = [asyncio.ensure_future(restored(rig, made)) for _ in range(3)]
    await turns(5)
    waiting[0].cancel()
    assert rig.moves is not None and not any(one.done() for one in waiting[1:])
    rig.snapshots.check_integrity()
    rig.engine.run()
    rig.engine.eager = True
    assert len(await waiting[1]) == len(await waiting[2]) == 1
    assert rig.moves.num_brought == {Tier.HOST: 1, Tier.FILE: 0}
    await rig.close()


async def test_what_is_released_while_it_comes_back_is_over(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    made = await captured(await prefilled(rig))
    await settled(rig)
    await pushed_out(rig)
    used = rig.lines.num_used
    rig.engine.eager = False
    waiting = asyncio.ensure_future(restored(rig, made))
    await turns(5)
    rig.snapshots.release([made.id], ANONYMOUS)
    rig.snapshots.check_integrity()
    rig.engine.run()
    rig.engine.eager = True
    with refuses(Reason.SNAPSHOT_UNKNOWN):
        await waiting
    rig.snapshots.check_integrity()
    assert rig.lines.num_used == used
    await rig.close()


async def test_close_finishes_what_is_copied(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, files=True)
    rig.engine.eager = False
    parent = opened(rig)
    stepping = asyncio.ensure_future(parent.step(PREFILL, 5))
    await turns(3)
    rig.engine.run()
    await stepping
    made = await captured(parent)
    await turns(3)
    closing = asyncio.ensure_future(rig.states.close())
    await turns(3)
    assert not closing.done()
    rig.engine.run()
    await closing
    rig.snapshots.check_integrity()
    assert rig.tiers.host is not None and rig.tiers.host.find(made.id) is not None
    await rig.tiers.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_close_lets_other_calls_go_on_until_threads_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Also where moves fail to end."""
    rig = make_rig(tmp_path)
    made = await captured(await prefilled(rig))
    begins, goes_on, went_on = threading.Event(), threading.Event(), list[bool]()

    def digest(data: memoryview) -> bytes:
        begins.set()
        went_on.append(goes_on.wait(5.0))
        return bytes(16)

    async def failing() -> None:
        raise OSError("no more")

    monkeypatch.setattr(xxhash, "xxh3_128_digest", digest)
    exporting = asyncio.ensure_future(exported(rig, made.id))
    await asyncio.to_thread(begins.wait)
    exporting.cancel()
    assert rig.moves is not None
    if fails:
        monkeypatch.setattr(rig.moves, "close", failing)
    closing = asyncio.ensure_future(rig.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    goes_on.set()
    with pytest.raises(OSError, match="no more") if fails else nullcontext():
        await closing
    assert went_on and all(went_on)
    with pytest.raises(asyncio.CancelledError):
        await exporting
    with pytest.raises(RuntimeError, match="shutdown"):
        await exported(rig, made.id)
