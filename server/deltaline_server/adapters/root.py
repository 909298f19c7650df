"""The folder that holds the adapters which clients may name, one directory each.

Nothing outside is opened: a name is one plain component, and directory and files are opened relative to descriptors,
without following links, then checked once open. So a file that is swapped meanwhile leads nowhere else.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltaline_server.adapters.directory import CONFIG_FILE, MAX_CONFIG_BYTES, TENSORS_FILE, check_name
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.tensor_file import DescriptorBytes

# A FIFO is opened at once, not when somebody writes to it; a terminal does not become ours.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PICKLES = ("adapter_model.bin", "adapter_model.pt")


class AdapterRoot:
    """One folder, held open from the start on: it stays the same if its path comes to mean another."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if it is no directory that can be read. Call `close` afterwards."""
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"--adapter-root: expected a directory, found none ({error.strerror})") from error

    def close(self) -> None:
        """Close the folder. To be called once."""
        os.close(self._descriptor)

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[bytes, DescriptorBytes]]:
        """Open the directory `name`: the text of its config, and its tensors, which are readable inside the context.

        Raises ModelError: no such name or directory, a file is missing, is no regular file, or can't be read.
        """
        check_name(name)
        try:
            directory = os.open(name, _DIRECTORY_FLAGS, dir_fd=self._descriptor)
        except OSError as error:
            why = _why(error)
            raise ModelError(f"name: expected a directory of adapters, found none {why}") from error
        try:
            with _opened(directory, CONFIG_FILE) as config:
                if config.size > MAX_CONFIG_BYTES:
                    raise ModelError(f"{CONFIG_FILE}: expected at most {MAX_CONFIG_BYTES} bytes, got {config.size}")
                text = bytes(config.read(0, config.size))
            with _opened(directory, TENSORS_FILE) as tensors:
                yield text, tensors
        finally:
            os.close(directory)


@contextmanager
def _opened(directory: int, file: str) -> Iterator[DescriptorBytes]:
    """Open a regular file of a directory. Raises ModelError naming it."""
    try:
        descriptor = os.open(file, _FILE_FLAGS, dir_fd=directory)
    except OSError as error:
        pickles = [name for name in _PICKLES if _exists(directory, name)] if file == TENSORS_FILE else []
        but = f"; {pickles[0]} can run code when it is loaded and is never read" if pickles else ""
        raise ModelError(f"{file}: expected a file, found none {_why(error)}{but}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ModelError(f"{file}: expected a regular file, got something else")
        yield DescriptorBytes(descriptor, file)
    finally:
        os.close(descriptor)


def _why(error: OSError) -> str:
    """What the system says, which is not that it met a link."""
    hint = "; links are not followed" if error.errno in (errno.ENOTDIR, errno.ELOOP) else ""
    return f"({error.strerror}){hint}"


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True
