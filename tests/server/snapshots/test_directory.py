"""The folder of states' files: whose it may be, who else uses it, and that a file is whole or absent."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rigs.states import FINGERPRINT, LAYOUT, SNAPSHOT, make_header, make_memory

from deltaline_server.snapshots.directory import StateDirectory, StateDirectoryError, name_of
from deltaline_server.snapshots.header import Flaw, StateFileError
from deltaline_server.snapshots.layout import SpanProgress

SECTIONS = LAYOUT.sections(SNAPSHOT)
MEMORY = make_memory()
HEADER = make_header()
NOW = 1_700_000_000_000_000_001


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "states")
    yield opened
    opened.close()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_state_comes_back_as_it_was_written(directory: StateDirectory, tmp_path: Path) -> None:
    stored = directory.write(HEADER, SECTIONS, MEMORY, NOW)
    found, _ = directory.read_header(name_of(HEADER.id), LAYOUT, FINGERPRINT)
    assert found == stored and found.header == HEADER and found.sections == SECTIONS
    memory = np.full_like(MEMORY, 0xEE)
    directory.read(found.remembered, LAYOUT, memory, NOW)
    assert (memory == MEMORY).all()
    assert directory.names() == [name_of(HEADER.id)]
    folder = tmp_path / "states"
    assert (mode_of(folder), mode_of(folder / "lock"), mode_of(folder / name_of(HEADER.id))) == (0o700, 0o600, 0o600)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = StateDirectory(tmp_path / "states")
        directory.write(HEADER, SECTIONS, MEMORY, NOW)
        directory.close()
    finally:
        os.umask(before)
    assert {mode_of(path) for path in (tmp_path / "states").iterdir()} == {0o600}
    assert mode_of(tmp_path / "states") == 0o700


def test_a_use_is_seen_after_a_restart(directory: StateDirectory) -> None:
    stored = directory.write(HEADER, SECTIONS, MEMORY, NOW)
    assert directory.read_header(name_of(HEADER.id), LAYOUT, FINGERPRINT)[1] == NOW
    directory.read(stored.remembered, LAYOUT, np.empty_like(MEMORY), NOW + 5)
    assert directory.read_header(name_of(HEADER.id), LAYOUT, FINGERPRINT)[1] == NOW + 5


def test_a_folder_is_one_server_s(directory: StateDirectory, tmp_path: Path) -> None:
    with pytest.raises(StateDirectoryError, match=r"^--state-dir: expected a folder of one server, another uses it$"):
        StateDirectory(tmp_path / "states")
    directory.close()
    directory.close()
    StateDirectory(tmp_path / "states").close()


def test_the_lock_of_a_server_that_was_killed_is_gone(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from deltaline_server.snapshots.directory import StateDirectory\n"
        "kept = StateDirectory(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "states"]).returncode == -9
    StateDirectory(tmp_path / "states").close()


def test_what_is_no_folder_of_this_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir(mode=0o750)
    with pytest.raises(StateDirectoryError, match="expected a folder of this user with mode 0700, got one of user"):
        StateDirectory(tmp_path / "wide")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for path in ("link", "file", "no/where", "link/"):
        with pytest.raises(StateDirectoryError, match="--state-dir: expected a folder") as error:
            StateDirectory(tmp_path / path)
        assert str(tmp_path) not in str(error.value)
    (tmp_path / "real" / "lock").symlink_to(tmp_path / "file")
    with pytest.raises(StateDirectoryError, match="expected a folder that can be locked"):
        StateDirectory(tmp_path / "real")


def test_a_folder_stays_the_same_when_its_path_means_another(directory: StateDirectory, tmp_path: Path) -> None:
    (tmp_path / "states").rename(tmp_path / "moved")
    (tmp_path / "states").mkdir()
    directory.write(HEADER, SECTIONS, MEMORY, NOW)
    assert not list((tmp_path / "states").iterdir()) and (tmp_path / "moved" / name_of(HEADER.id)).exists()


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "fsync", "rename"])
def test_a_write_that_fails_leaves_nothing(
    directory: StateDirectory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        directory.write(HEADER, SECTIONS, MEMORY, NOW)
    assert directory.names() == []


def test_a_folder_that_cannot_be_synced_keeps_no_file(
    directory: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a snapshot that nobody knows of would be found after a restart, also one that was released."""
    fsync = os.fsync

    def fail_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(OSError, match="Input/output error"):
        directory.write(HEADER, SECTIONS, MEMORY, NOW)
    assert directory.names() == []


@pytest.mark.parametrize("call", ["posix_fallocate", "posix_fadvise"])
def test_a_file_system_without_such_a_call_does(
    directory: StateDirectory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, call, fail)
    memory = np.zeros_like(MEMORY)
    directory.read(directory.write(HEADER, SECTIONS, MEMORY, NOW).remembered, LAYOUT, memory, NOW)
    assert (memory == MEMORY).all()


def test_partial_writes_and_reads_go_on(directory: StateDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, content, offset: pwrite(fd, content[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:777]], offset))
    memory = np.zeros_like(MEMORY)
    directory.read(directory.write(HEADER, SECTIONS, MEMORY, NOW).remembered, LAYOUT, memory, NOW)
    assert (memory == MEMORY).all()


def test_the_order_is_write_sync_rename_sync(directory: StateDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("pwrite", "fsync", "rename"):

        def record(*arguments: object, name: str = name, call: object = getattr(os, name), **keys: object) -> object:
            calls.append(name)
            assert callable(call)
            return call(*arguments, **keys)

        monkeypatch.setattr(os, name, record)
    directory.write(HEADER, SECTIONS, MEMORY, NOW)
    assert calls == ["pwrite", "pwrite", "fsync", "rename", "fsync"]


def test_what_was_never_whole_is_removed(directory: StateDirectory, tmp_path: Path) -> None:
    directory.write(HEADER, SECTIONS, MEMORY, NOW)
    for name in (f"{'ab' * 16}.part", "notes.part"):
        (tmp_path / "states" / name).touch()
    directory.remove_parts()
    assert directory.names() == sorted([name_of(HEADER.id), "notes.part"])


def test_a_file_that_became_another_is_not_read(directory: StateDirectory, tmp_path: Path) -> None:
    stored = directory.write(HEADER, SECTIONS, MEMORY, NOW)
    os.unlink(tmp_path / "states" / name_of(HEADER.id))
    with pytest.raises(StateFileError, match="can't be used") as gone:
        directory.read(stored.remembered, LAYOUT, np.empty_like(MEMORY), NOW)
    directory.write(make_header(owner="mallory"), SECTIONS, MEMORY, NOW)
    with pytest.raises(StateFileError, match="expected the header that was there before") as other:
        directory.read(stored.remembered, LAYOUT, np.empty_like(MEMORY), NOW)
    assert (gone.value.flaw, other.value.flaw) == (Flaw.GONE, Flaw.HEADER)
    assert all(HEADER.id.hex() not in str(each.value) for each in (gone, other))


def test_a_large_state_is_read_and_written_in_pieces(directory: StateDirectory) -> None:
    spans = (SpanProgress(position=500, reply_bytes=9_000_001), SpanProgress(position=500, reply_bytes=9_000_000))
    header, memory = make_header(spans=spans), make_memory(spans=spans)
    back = np.zeros_like(memory)
    directory.read(directory.write(header, LAYOUT.sections(spans), memory, NOW).remembered, LAYOUT, back, NOW)
    assert (back == memory).all()
