"""An adapter's two files as the messages of an upload: read a chunk at a time, when the channel asks for the next.

What is in the files is the server's to check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from deltaline.v1 import adapter_service_pb2 as pb

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
# The server takes no more.
MAX_CONFIG_BYTES = 1 << 20
_PICKLES = ("adapter_model.bin", "adapter_model.pt")

Progress = Callable[[int, int], object]
"""Called with how many bytes of the tensors are on their way, and how many there are; from 0 again when sent again."""

Files = tuple[bytes, int, Iterator[bytes]]
"""The config's text, the size of the tensors' file in bytes, and that file in chunks."""


Source = Callable[[int], AbstractContextManager[Files]]
"""Opens an adapter's files, in chunks of so many bytes, readable inside the context. Raises OSError, ValueError; so do
the chunks."""


@contextmanager
def files_in(directory: Path, chunk_bytes: int) -> Iterator[Files]:
    """The files of a directory as PEFT writes it. Raises as a Source."""
    if not directory.exists():
        raise FileNotFoundError(f"{directory}: expected a directory, found nothing")
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory}: expected a directory, found something else")
    pickles = [name for name in _PICKLES if (directory / name).exists()]
    if pickles and not (directory / TENSORS_FILE).exists():
        raise ValueError(
            f"{TENSORS_FILE}: expected a file, found only {pickles[0]}, which can run code when it is loaded; "
            "save the adapter as safetensors"
        )
    for name in (CONFIG_FILE, TENSORS_FILE):
        if not (directory / name).exists():
            raise FileNotFoundError(f"{directory}: expected an adapter as PEFT writes it, found no {name}")
    with open(directory / CONFIG_FILE, "rb") as file:
        config = file.read(MAX_CONFIG_BYTES + 1)
    if len(config) > MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG_FILE}: expected at most {MAX_CONFIG_BYTES} bytes, got more")
    with open(directory / TENSORS_FILE, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        yield config, size, _chunks(file, size, chunk_bytes)


@contextmanager
def files_of(config: bytes, tensors: memoryview, chunk_bytes: int) -> Iterator[Files]:
    """Files whose contents are in memory, and must not change meanwhile."""
    size = len(tensors)
    yield config, size, (bytes(tensors[at : at + chunk_bytes]) for at in range(0, size, chunk_bytes))


class Upload:
    """The messages of one attempt at a load.

    Attributes: error, why they ended before the last one: a server takes nothing that is cut short, and refuses the
    call. is_over: set by whoever made the call when it has ended.
    """

    def __init__(self, source: Source | None, chunk_bytes: int, progress: Progress | None) -> None:
        """source: None for the server's folder."""
        self._source, self._chunk_bytes, self._progress = source, chunk_bytes, progress
        self.error: Exception | None = None
        self.is_over = False

    def messages(self, name: str, pinned: bool, shared: bool = False) -> Generator[pb.LoadAdapterRequest, None, None]:
        """The messages in order. They may be asked for in any thread, which is the one that reads the files."""
        if self._source is None:
            yield pb.LoadAdapterRequest(name=name, pinned=pinned, shared=shared)
            return
        try:
            with self._source(self._chunk_bytes) as (config, size, chunks):
                upload = pb.AdapterUpload(config=config, tensors_bytes=size)
                yield pb.LoadAdapterRequest(name=name, pinned=pinned, shared=shared, upload=upload)
                sent = 0
                self._report(sent, size)
                for chunk in chunks:
                    yield pb.LoadAdapterRequest(chunk=chunk)
                    sent += len(chunk)
                    self._report(sent, size)
        except Exception as error:  # an iterator that raises is something else to each gRPC: the caller gets it
            self.error = error

    def _report(self, sent: int, size: int) -> None:
        if self._progress is not None and not self.is_over:
            self._progress(sent, size)


def _chunks(file: BinaryIO, size: int, chunk_bytes: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, in chunks. Raises ValueError if it has fewer."""
    left = size
    while left:
        chunk = file.read(min(chunk_bytes, left))
        if not chunk:
            raise ValueError(f"{TENSORS_FILE}: expected {size} bytes, got {size - left}: it was changed meanwhile")
        left -= len(chunk)
        yield chunk
