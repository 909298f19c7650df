"""Where the link's socket lies: a folder of the user's alone or a group's, and no other server's socket is taken."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from deltaline_server.app import Server, StartError
from deltaline_server.front.link.socket_file import SocketFile, SocketFileError, open_link


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def stale_socket(path: Path) -> None:
    """What a server leaves behind that is killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))


def test_folder_and_socket_are_the_users_alone_and_go(tmp_path: Path) -> None:
    file = SocketFile(tmp_path / "run" / "a.sock", None)
    assert (mode(tmp_path / "run"), mode(file.path)) == (0o700, 0o600)
    file.close()
    file.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_stale_sockets_are_removed_and_living_ones_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    living = SocketFile(folder / "living.sock", None)
    for name in ("mine.sock", "other.sock", "else"):
        stale_socket(folder / name)
    (folder / "file.sock").write_text("no socket")
    mine = SocketFile(folder / "mine.sock", None)
    assert {path.name for path in folder.iterdir()} == {"living.sock", "mine.sock", "else", "file.sock"}
    for taken in ("living.sock", "file.sock"):
        with pytest.raises(SocketFileError, match="another server listens there, or it is no socket"):
            SocketFile(folder / taken, None)
    assert (folder / "file.sock").read_text() == "no socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(living.path))
    for file in (living, mine):
        file.close()


def test_a_server_removes_no_socket_but_its_own(tmp_path: Path) -> None:
    file = SocketFile(tmp_path / "run" / "a.sock", None)
    file.path.unlink()
    stale_socket(tmp_path / "run" / "b.sock")
    stale_socket(file.path)
    file.close()
    assert file.path.exists()


@pytest.mark.parametrize("wrong", [0o755, 0o770, 0o750, 0o677, 0o1777])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, wrong: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(wrong)
    with pytest.raises(SocketFileError, match=r"to be a folder of this user's, with mode 700; got mode"):
        SocketFile(folder / "a.sock", None)


def test_a_link_to_a_folder_and_another_users_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(SocketFileError, match=r"expected .*run to be a folder"):
        SocketFile(tmp_path / "run" / "a.sock", None)
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(SocketFileError, match="to be a folder of this user's"):
        SocketFile(tmp_path / "real" / "a.sock", None)


def test_a_group_may_enter_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owners, chown = set[int](), os.chown

    def noted(path: Path, owner: int, group: int) -> None:
        owners.add(owner)
        chown(path, owner, group)

    monkeypatch.setattr(os, "chown", noted)
    file = SocketFile(tmp_path / "run" / "a.sock", os.getegid())
    assert (mode(tmp_path / "run"), mode(file.path)) == (0o750, 0o660)
    assert {file.path.stat().st_gid, file.path.parent.stat().st_gid} == {os.getegid()}
    assert owners == {-1}, "only root may give its files away"
    file.close()


def test_in_a_folder_that_can_not_be_there_is_no_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert open_link(f"{tmp_path}/file/", None, 50051) is None
    assert "no local link" in caplog.text
    with pytest.raises(SocketFileError, match="to be a folder of this user's"):
        open_link(f"{tmp_path}/file/a.sock", None, 50051)
    with pytest.raises(SocketFileError, match=r"can't make the folder .* \(No such file or directory\)"):
        open_link(f"{tmp_path}/none/none/a.sock", None, 50051)
    assert open_link("off", None, 50051) is open_link(None, None, 50051) is None


async def test_a_second_server_is_refused_in_words_and_takes_a_folder(
    make_server: Callable[..., Server], tmp_path: Path
) -> None:
    link = f"{tmp_path}/run/"
    async with make_server(link=link) as first:
        assert first.link.path == f"{tmp_path}/run/{first.port}.sock"
        with pytest.raises(StartError, match=r"--link: can't listen on .*another server listens there"):
            await make_server(link=first.link.path).start()
        async with make_server(link=link) as second:
            assert second.link.path != first.link.path
        assert os.listdir(f"{tmp_path}/run") == [f"{first.port}.sock"]
