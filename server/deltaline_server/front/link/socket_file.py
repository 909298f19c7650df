"""The file of the link's socket: in a folder of the server's user alone, or of a group; gone when the server is."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltaline_server.local_socket import OFF, SUFFIX, group_number, socket_path
from deltaline_server.log import event

# Connections that wait to be accepted; Linux has no more than it is told to (net.core.somaxconn).
BACKLOG = 128

_log = logging.getLogger(__name__)


class SocketFileError(RuntimeError):
    """No socket can be made there; the message says why, for the operator."""


class SocketFile:
    """A listening socket and its file. Raises SocketFileError when made where that can't be.

    is_for_group: whether the file's mode lets a group in beside this user.
    """

    def __init__(self, path: Path, group: int | None) -> None:
        """path: of the file; its folder is made if its own folder is there. group: the number of the group whose
        members may connect beside this user, None for nobody else."""
        self.path, self.is_for_group = path, group is not None
        _make_folder(path.parent, group)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _locked(path.parent):
                _remove_stale(path.parent)
                self.socket.bind(os.fspath(path))
                if group is not None:
                    os.chown(path, -1, group)
                path.chmod(0o600 if group is None else 0o660)
                self.socket.listen(BACKLOG)
        except OSError as error:
            self.socket.close()
            hint = ": another server listens there, or it is no socket" if error.errno == errno.EADDRINUSE else ""
            raise SocketFileError(f"can't listen on {path} ({error.strerror or error}){hint}") from error
        self.socket.setblocking(False)
        self._inode = path.lstat().st_ino

    def close(self) -> None:
        """Listen no more, and remove the file unless it is another's by now. Idempotent."""
        self.socket.close()
        with suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()


def open_link(link: str | None, group: str | None, port: int) -> SocketFile | None:
    """Listen where --link says, with --link-group; None for nowhere. port: of gRPC.

    Raises SocketFileError; of a folder the log says so, and there is no link.
    """
    if link is None or link == OFF:
        return None
    try:
        return SocketFile(socket_path(link, port), None if group is None else group_number(group))
    except SocketFileError as error:
        if not link.endswith("/"):
            raise
        event(_log, "no local link", level=logging.WARNING, why=error)
        return None


def _make_folder(folder: Path, group: int | None) -> None:
    """Make the folder, or check one that is there: no other user may put a socket into it. Raises SocketFileError."""
    mode = 0o700 if group is None else 0o750
    try:
        with suppress(FileExistsError):
            folder.mkdir(0o700)
            if group is not None:
                os.chown(folder, -1, group)
            folder.chmod(mode)
        found = folder.lstat()
    except OSError as error:
        raise SocketFileError(f"can't make the folder {folder} ({error.strerror})") from error
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    is_closed = stat.S_IMODE(found.st_mode) & 0o777 == mode and group in (None, found.st_gid)
    if not (is_ours and is_closed):
        whose = f"mode {mode:o}" + ("" if group is None else f" and the group {group}")
        raise SocketFileError(
            f"expected {folder} to be a folder of this user's, with {whose}; got mode "
            f"{stat.S_IMODE(found.st_mode):o}, user {found.st_uid}, group {found.st_gid}"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One server at a time looks which sockets are stale and makes its own."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_stale(folder: Path) -> None:
    """Remove sockets of servers that are gone."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and _is_stale(path):
                path.unlink()


def _is_stale(path: Path) -> bool:
    """Whether nobody listens. One whose backlog is full is alive."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
