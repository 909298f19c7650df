"""The folder of states' files: one server's alone, and in it whole files or none.

Files are reached by the folder's descriptor and without following links. All calls block; they may come from any
thread. Knows names and files, not which state may make way for another.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from deltaline_server.snapshots.header import Flaw, RememberedHeader, StateFileError, StateHeader, StoredHeader
from deltaline_server.snapshots.layout import Bytes, Section, StateLayout
from deltaline_server.snapshots.state_file import read_header, read_state, write_state

LOCK = "lock"
MOVES = "moves"
"""The file of records of moves, one after another."""
_NEW_MOVES = "moves.part"
_STATE = re.compile(r"([0-9a-f]{32})\.state")
# One that is being written, or that a server left so which is gone.
_PART = re.compile(r"[0-9a-f]{32}\.part")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO is opened at once, not when somebody writes to it; a terminal does not become ours.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class StateDirectoryError(RuntimeError):
    """The folder can't be used; the message is one line for the operator."""


class StateDirectory:
    """A folder, 0700, and its files, 0600. Held open and locked until `close`: it stays the same if its path comes to
    mean another."""

    def __init__(self, path: Path) -> None:
        """Make the folder unless it is there; its own folder has to be. Raises StateDirectoryError."""
        self._lock = -1
        try:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            self._folder = os.open(path, _FOLDER_FLAGS)
        except OSError as error:
            hint = "; links are not followed" if error.errno in (errno.ENOTDIR, errno.ELOOP) else ""
            raise StateDirectoryError(
                f"--state-dir: expected a folder, or a new name in one, got neither ({error.strerror}){hint}"
            ) from error
        try:
            self._check_and_lock()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the folder back. Idempotent."""
        for descriptor in (self._lock, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._folder = -1

    def names(self) -> list[str]:
        """Names of everything that is in the folder, but for the lock and the records of moves. Raises OSError."""
        return sorted(name for name in os.listdir(self._folder) if name not in (LOCK, MOVES, _NEW_MOVES))

    def remove_parts(self) -> None:
        """Remove files that were never whole. To be called before the first `write`."""
        for name in self.names():
            if _PART.fullmatch(name):
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._folder)

    def read_header(self, name: str, layout: StateLayout, fingerprint: bytes) -> tuple[StoredHeader, int]:
        """Read and judge a file's header; return it and when the file was last used, nanoseconds.

        Raises StateFileError: it is no state of this fingerprint that could be read.
        """
        match = _STATE.fullmatch(name)
        if match is None:
            raise StateFileError(Flaw.NAME, "expected 32 hexadecimal digits and .state")
        with self._opened(name) as descriptor:
            stored = read_header(descriptor, layout, fingerprint)
            if stored.header.id.hex() != match[1]:
                raise StateFileError(Flaw.NAME, "expected the name of the state that is in the file")
            return stored, os.fstat(descriptor).st_mtime_ns

    def size(self, name: str) -> tuple[int, int]:
        """Bytes of a file, and when it was last used, nanoseconds. Raises OSError."""
        status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        return status.st_size, status.st_mtime_ns

    def read(self, before: RememberedHeader, layout: StateLayout, memory: Bytes, used_ns: int) -> None:
        """Read a state whose header was read before into its memory. used_ns: what the file is told as its last use.

        Raises StateFileError: it is not the same any more, or not whole. Then the memory is spoilt.
        """
        with self._opened(name_of(before.header.id)) as descriptor:
            stored = read_header(descriptor, layout, before.header.fingerprint)
            if stored.remembered != before:
                raise StateFileError(Flaw.HEADER, "expected the header that was there before, got another")
            read_state(descriptor, stored, memory)
            with suppress(OSError):
                os.utime(descriptor, ns=(used_ns, used_ns))

    def write(self, header: StateHeader, sections: Sequence[Section], memory: Bytes, used_ns: int) -> StoredHeader:
        """Write a state's file: once this returns it outlasts the host; if it raises there is none. Raises OSError."""
        part, name = f"{header.id.hex()}.part", name_of(header.id)
        descriptor = os.open(part, _NEW_FLAGS, 0o600, dir_fd=self._folder)
        try:
            try:
                stored = write_state(descriptor, header, sections, memory)
                os.utime(descriptor, ns=(used_ns, used_ns))
            finally:
                os.close(descriptor)
            os.rename(part, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            os.fsync(self._folder)
        except BaseException:
            for each in (part, name):
                with suppress(OSError):
                    os.unlink(each, dir_fd=self._folder)
            raise
        return stored

    def read_records(self, most_bytes: int) -> bytes:
        """All records of moves, empty where there is no file. Raises StateFileError: it is none of ours, or larger."""
        try:
            with self._opened(MOVES) as descriptor, open(descriptor, "rb", closefd=False) as file:
                content = file.read(most_bytes + 1)
        except StateFileError as error:
            if error.flaw is Flaw.GONE:
                return b""
            raise
        if len(content) > most_bytes:
            raise StateFileError(Flaw.LENGTH, f"expected at most {most_bytes} bytes of records")
        return content

    def append_record(self, content: bytes) -> int:
        """Write a record behind the others; once this returns it outlasts the host. Returns its bytes.

        Raises StateFileError: it is not there, as far as that can be seen to."""
        with self._opened(MOVES, _APPEND_FLAGS) as descriptor:
            before = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
                if not before:
                    os.fsync(self._folder)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise
        return len(content)

    def replace_records(self, content: bytes) -> None:
        """Let these be all records of moves. Raises OSError: those before are there."""
        self.remove(_NEW_MOVES)
        if not content:
            self.remove(MOVES)
            return
        descriptor = os.open(_NEW_MOVES, _NEW_FLAGS, 0o600, dir_fd=self._folder)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.rename(_NEW_MOVES, MOVES, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is gone. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def _check_and_lock(self) -> None:
        """Raise StateDirectoryError unless the folder is this user's alone, and no other server's."""
        status = os.fstat(self._folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            got = f"one of user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"
            raise StateDirectoryError(f"--state-dir: expected a folder of this user with mode 0700, got {got}")
        try:
            self._lock = os.open(LOCK, _LOCK_FLAGS, 0o600, dir_fd=self._folder)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateDirectoryError("--state-dir: expected a folder of one server, another uses it") from error
        except OSError as error:
            raise StateDirectoryError(
                f"--state-dir: expected a folder that can be locked ({error.strerror})"
            ) from error

    @contextmanager
    def _opened(self, name: str, flags: int = _READ_FLAGS) -> Iterator[int]:
        """Open a regular file of this user. Raises StateFileError, also in place of an OSError inside."""
        try:
            descriptor = os.open(name, flags, 0o600, dir_fd=self._folder)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
                    raise StateFileError(Flaw.KIND, "expected a regular file of this user with one name")
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            flaws = {errno.ELOOP: Flaw.KIND, errno.ENXIO: Flaw.KIND, errno.ENOENT: Flaw.GONE}
            flaws |= dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM), Flaw.BUSY)
            flaw = flaws.get(error.errno or 0, Flaw.UNREADABLE)
            raise StateFileError(flaw, f"can't be used ({error.strerror})") from error


def name_of(id: bytes) -> str:
    """The name of a state's file."""
    return f"{id.hex()}.state"
