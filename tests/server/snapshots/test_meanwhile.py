"""What befalls a snapshot while it waits to be brought up, between a look for it and what is done then."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rigs.scheduler_rig import refuses, turns
from rigs.stored_states import captured, described, leave_host, make_rig, prefilled, pushed_out, restored, settled
from rigs.until import until

from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS
from deltaline_server.snapshots.directory import StateDirectory
from deltaline_server.snapshots.files import Miss
from deltaline_server.snapshots.layout import Bytes
from deltaline_server.tables.captured.snapshot import SnapshotState
from deltaline_server.tables.prefixes.cost import Tier

RELEASED, EXPIRED, EVICTED = SnapshotState.RELEASED, SnapshotState.EXPIRED, SnapshotState.EVICTED


@pytest.mark.parametrize(
    ("how", "is_in_thread"),
    # What a thread reads is not evicted.
    [(RELEASED, False), (EXPIRED, False), (EVICTED, False), (RELEASED, True), (EXPIRED, True)],
)
async def test_what_is_over_before_its_file_is_read_is_not_lost(
    how: SnapshotState, is_in_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file goes before a thread is asked to read it, or before the thread opens it."""
    rig = make_rig(tmp_path, files=True)
    files, host, moves = rig.tiers.files, rig.tiers.host, rig.moves
    assert files is not None and host is not None and moves is not None
    made = await captured(await prefilled(rig))
    await settled(rig)
    await pushed_out(rig)
    await leave_host(rig, made.id)
    load, read, loop = files.load, StateDirectory.read, asyncio.get_running_loop()

    async def end() -> None:
        if how is RELEASED:
            rig.snapshots.release([made.id], ANONYMOUS)
        elif how is EXPIRED:
            rig.now += 2e3
            rig.snapshots.reap()
        elif await files.release(made.id):
            files.on_evicted(made.id)
        await until(lambda: not files.used_bytes)

    async def load_later(id: bytes, memory: Bytes) -> Miss | None:
        await end()
        return await load(id, memory)

    def read_later(*arguments: Any) -> None:
        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        read(*arguments)

    if is_in_thread:
        monkeypatch.setattr(StateDirectory, "read", read_later)
    else:
        monkeypatch.setattr(files, "load", load_later)
    with refuses(Reason.SNAPSHOT_UNKNOWN) as caught:
        await restored(rig, made)
    assert caught.value.refusal.metadata == {"state": how.name}
    assert (moves.num_lost, files.flaws, host.used_bytes) == (0, Counter(), 0)
    rig.snapshots.check_integrity()
    await rig.close()


async def test_what_came_to_the_device_is_not_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot waits for its turn to be read for an export, comes to the device meanwhile, and host memory evicts it:
    the device's copy is exported, and a damaged file ends nothing."""
    rig = make_rig(tmp_path, files=True)
    files, host, moves = rig.tiers.files, rig.tiers.host, rig.moves
    assert files is not None and host is not None and moves is not None
    made, other = [await captured(await prefilled(rig)) for _ in range(2)]
    await settled(rig)
    await pushed_out(rig)
    await leave_host(rig, other.id)
    load, may_read = files.load, asyncio.Event()

    async def load_later(id: bytes, memory: Bytes) -> Miss | None:
        await may_read.wait()
        return await load(id, memory)

    monkeypatch.setattr(files, "load", load_later)
    rig.engine.eager = False
    landing = asyncio.ensure_future(moves.bring_back(made.id))
    await turns(5)
    exports = [asyncio.ensure_future(moves.bring_to_host(one.id)) for one in (other, made)]
    await turns(5)
    rig.engine.run()
    rig.engine.eager = True
    await landing
    assert described(rig, made).tier is Tier.DEVICE
    await leave_host(rig, made.id)
    (tmp_path / "states" / f"{made.id.hex()}.state").write_bytes(b"")
    may_read.set()
    await asyncio.gather(*exports)
    assert described(rig, made).tier is Tier.DEVICE and host.find(made.id) is not None
    assert (moves.num_lost, files.flaws) == (0, Counter())
    rig.snapshots.check_integrity()
    await rig.close()
