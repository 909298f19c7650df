"""Records of moves: on the disk before they count, found by the next server of the name, and bounded."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import refuses

from deltaline_server.errors import Reason
from deltaline_server.moving.records import MovedRecords, Record
from deltaline_server.snapshots.directory import StateDirectory
from deltaline_server.tables.moved import MovedSequences, Owner

OWNER = Owner("there:50051", 2**64 - 1, 2**63 + 1)
MAX_LEASE_S = 1000.0
RECORD = Record("here:1", 5, 7, "alice", "there:50051", 2**64 - 1, 2**63 + 1, 2_000_000_000_000)


class Wall:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "states"


@pytest.fixture
def directory(folder: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(folder)
    yield opened
    opened.close()


class Served:
    """What a server that starts has of a folder."""

    def __init__(self, directory: StateDirectory, wall: Wall, max_bytes: int = 1 << 20) -> None:
        self.moved = MovedSequences(wall)
        self.records = MovedRecords(directory, self.moved, MAX_LEASE_S, wall, max_bytes)

    async def start(self, name: str = "here:1") -> Served:
        await self.records.load(name)
        return self

    def found(self, *handles: int, epoch: int = 5, principal: str = "alice") -> list[bool]:
        return [self.moved.find(epoch, handle, principal) == OWNER for handle in handles]

    async def add(self, *handles: int, lease_s: float = 60.0) -> None:
        for handle in handles:
            await self.records.add(5, handle, "alice", OWNER, lease_s)


async def test_the_next_server_of_the_name_tells_where_they_live(directory: StateDirectory) -> None:
    wall = Wall()
    first = await Served(directory, wall).start()
    await first.add(7, 8)
    for _ in range(2):  # and the one after that
        after = await Served(directory, wall).start()
        assert after.found(7, 8, 9) == [True, True, False]
        assert after.found(7, epoch=6) == after.found(7, principal="bob") == [False]
    assert (await Served(directory, wall).start("another:1")).found(7, 8) == [False, False]
    assert (await Served(directory, wall).start()).found(7, 8) == [True, True], "another name has lost none"
    assert directory.names() == [], "the file is not taken for a state's"


async def test_they_are_told_as_long_as_the_lease_was(directory: StateDirectory) -> None:
    wall = Wall()
    await (await Served(directory, wall).start()).add(7, lease_s=10.0)
    wall.now += 9.9
    after = await Served(directory, wall).start()
    assert after.found(7) == [True]
    wall.now += 0.2
    assert after.found(7) == [False]
    assert (await Served(directory, wall).start()).found(7) == [False]


async def test_a_clock_that_was_set_back_lets_none_stay_longer_than_a_lease(directory: StateDirectory) -> None:
    wall = Wall()
    await (await Served(directory, wall).start()).add(7)
    wall.now -= 1e6
    after = await Served(directory, wall).start()
    assert after.found(7) == [True]
    wall.now += MAX_LEASE_S + 1
    assert after.found(7) == [False]


async def test_a_record_is_on_the_disk_before_it_counts(
    directory: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, calls = await Served(directory, Wall()).start(), list[str]()
    for call in (os.write, os.fsync):

        def noted(*arguments: Any, call: Any = call) -> Any:
            calls.append(call.__name__)
            return call(*arguments)

        monkeypatch.setattr(os, call.__name__, noted)
    await served.add(7)
    assert calls == ["write", "fsync", "fsync"], "the file, and the folder that has got it"
    await served.add(8)
    assert calls[3:] == ["write", "fsync"]


@pytest.mark.parametrize("fails", ["write", "fsync", "open"])
async def test_one_that_can_not_be_written_is_refused_and_nothing_of_it_is_found(
    directory: StateDirectory, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = Wall()
    served = await Served(directory, wall).start()
    await served.add(7)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, fails, fail)
        with refuses(Reason.MOVE_FAILED) as refused:
            await served.add(8)
    assert refused.value.refusal.retry_after_s
    await served.add(9)
    assert (await Served(directory, wall).start()).found(7, 8, 9) == [True, False, True]


LINE = RECORD.line().strip()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda line: line[:-3], id="cut"),
        pytest.param(lambda line: line.replace(b"there", b"where"), id="another server"),
        pytest.param(lambda line: b"", id="nothing"),
        pytest.param(lambda line: b"\xff" * 100, id="no text"),
        pytest.param(lambda line: b"[" * 100_000, id="deep"),
    ],
)
async def test_damaged_records_are_passed_over_and_their_neighbours_found(
    directory: StateDirectory, folder: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wall = Wall()
    await (await Served(directory, wall).start()).add(8)
    good = (folder / "moves").read_bytes()
    (folder / "moves").write_bytes(damage(LINE) + good)
    for _ in range(2):
        after = await Served(directory, wall).start()
        assert after.found(7, 8) == [False, True]
        await after.add(9)
    assert (folder / "moves").read_bytes().startswith(b"\n"), "what is damaged is not kept"
    assert ("damaged records" in caplog.text) == bool(damage(LINE))


async def test_records_that_can_t_be_read_now_stay(
    directory: StateDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    wall = Wall()
    await (await Served(directory, wall).start()).add(8)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        await Served(directory, wall).start()
    assert "can't be used" in caplog.text
    assert (await Served(directory, wall).start()).found(8) == [True]


async def test_of_several_records_of_one_sequence_the_last_counts(directory: StateDirectory) -> None:
    wall, later = Wall(), Owner("later:1", 78, 100)
    served = await Served(directory, wall).start()
    await served.add(7)
    await served.records.add(5, 7, "alice", later, 90.0)
    assert (await Served(directory, wall).start()).moved.find(5, 7, "alice") == later
    wall.now += 70
    after = await Served(directory, wall).start()
    assert after.moved.find(5, 7, "alice") == later and after.moved.count_untold() == 0


async def test_a_file_that_could_not_be_read_at_the_start_keeps_its_bound(
    directory: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    wall, bound = Wall(), 25 * len(RECORD.line())
    await (await Served(directory, wall, bound).start()).add(*range(20))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        served = await Served(directory, wall, bound).start()
    await served.add(*range(20, 60))
    assert sum((await Served(directory, wall, bound).start()).found(*range(60))) >= 12


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"epoch": -1}, id="negative"),
        pytest.param({"sequence": 2**64}, id="too large"),
        pytest.param({"handle": True}, id="a bool"),
        pytest.param({"until_ms": 1e300}, id="a float"),
        pytest.param({"server": None}, id="null"),
        pytest.param({"server": "s" * 1000}, id="long"),
    ],
)
def test_a_record_that_can_not_be_is_none(changes: dict[str, Any]) -> None:
    assert Record.read(LINE) == RECORD
    with pytest.raises(ValueError, match="expected"):
        Record.read(replace(RECORD, **changes).line().strip())


@pytest.mark.parametrize("kind", ["link", "second name", "fifo", "large"])
async def test_what_is_no_file_of_records_is_replaced(
    directory: StateDirectory, folder: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    other, path, wall = tmp_path / "other", folder / "moves", Wall()
    other.write_bytes(RECORD.line())
    match kind:
        case "link":
            path.symlink_to(other)
        case "second name":
            path.hardlink_to(other)
        case "fifo":
            os.mkfifo(path)
        case "large":
            path.write_bytes(RECORD.line() * 10_000)
    served = await Served(directory, wall).start()
    assert served.found(7) == [False] and "is removed" in caplog.text
    await served.add(8)
    assert (await Served(directory, wall).start()).found(7, 8) == [False, True]
    assert other.read_bytes() == RECORD.line(), "what it led to is as it was"


async def test_the_file_is_bounded_and_those_that_last_longest_stay(directory: StateDirectory, folder: Path) -> None:
    wall, most = Wall(), 20 * len(RECORD.line())
    served = await Served(directory, wall, most).start()
    leases_s = np.random.default_rng(3).permutation(200) + 1.0
    for handle, lease_s in enumerate(leases_s.tolist()):
        await served.add(handle, lease_s=lease_s)
        assert (folder / "moves").stat().st_size <= most
    found = (await Served(directory, wall, most).start()).found(*range(200))
    assert 5 <= sum(found) <= 20
    assert all(found[handle] for handle in np.argsort(leases_s)[-5:])


async def test_a_folder_that_can_not_be_read_ends_no_server(
    directory: StateDirectory, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "moves").mkdir()
    served = await Served(directory, Wall()).start()
    assert "can't be used" in caplog.text
    with refuses(Reason.MOVE_FAILED):
        await served.add(7)
