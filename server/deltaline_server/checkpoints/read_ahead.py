"""Reading a checkpoint ahead of who loads from it: by several threads, in the order of the files, within a bound."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

import torch
import xxhash
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import E8M0, FP8, Checkpoint, TensorInfo, part_of
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.fingerprint import identity_of
from deltaline_server.checkpoints.staging import PIECE_BYTES, Staging
from deltaline_server.checkpoints.tensor_file import TORCH_DTYPES, DescriptorBytes

# One copies 2 to 8 GB/s out of the page cache and hashes them; a GPU takes 50.
MAX_THREADS = 8
# Of tensors that nobody has asked for yet; one may be larger.
WINDOW_BYTES = 2 << 30
STORED_DTYPES = TORCH_DTYPES | {FP8: torch.float8_e4m3fn, E8M0: torch.float8_e8m0fnu}


class _Whole(NamedTuple):
    tensor: Tensor
    digest: bytes


class ReadAhead:
    """The tensors of a checkpoint on a device, each read whole, hashed, and kept until another one is asked for.

    So ranks, which read different parts of a tensor, find the same digests. One thread reads from it. A context
    manager, whose end waits for what is being read and closes the files.
    """

    def __init__(self, checkpoint: Checkpoint, staging: Staging) -> None:
        self._checkpoint, self._staging = checkpoint, staging
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="read")
        self._stack = ExitStack()
        self._files: dict[Path, DescriptorBytes] = {}
        # Groups of names that nobody reads yet, and what is being read or waits for who asks.
        self._ahead: deque[str] = deque()
        self._group: dict[str, int] = {}
        self._window: dict[str, Future[_Whole]] = {}
        self._window_bytes = 0
        self._name, self._whole = "", torch.empty(0)
        self._digests: dict[str, bytes] = {}

    @property
    def names(self) -> Iterable[str]:
        return self._checkpoint.names

    def info(self, name: str) -> TensorInfo:
        """Tell about a tensor without reading it."""
        return self._checkpoint.info(name)

    def begin(self, groups: Mapping[int, Sequence[str]]) -> list[int]:
        """Begin to read groups of tensors in the order in which files have them; return that order.

        What of a group was not asked for is let go when a tensor of a later one is. Raises ModelError as `info`.
        """
        places = {name: self._checkpoint.place(name) for names in groups.values() for name in names}
        ordered = {key: sorted(names, key=places.__getitem__) for key, names in groups.items()}
        order = sorted(groups, key=lambda key: [places[name] for name in ordered[key][:1]])
        for number, key in enumerate(order):
            self._ahead.extend(ordered[key])
            self._group.update(dict.fromkeys(ordered[key], number))
        self._fill()
        return order

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a part of a tensor, which shares memory with the whole. Raises ModelError if its file can't be read."""
        if name != self._name:
            self._name, self._whole = "", torch.empty(0)  # the device need not hold two
            whole = self._take(name)
            self._staging.hand_over(whole.tensor)
            self._digests.setdefault(name, whole.digest)
            info = self.info(name)
            self._name, self._whole = name, whole.tensor.view(STORED_DTYPES[info.dtype]).view(info.shape)
        return part_of(self._whole, rows, columns)

    def identity(self) -> list[list[object]]:
        """Of each tensor that was read: see identity_of."""
        return identity_of(self, self._digests)

    def close(self) -> None:
        """Read nothing more. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
        self._window.clear()
        self._whole = torch.empty(0)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, name: str) -> _Whole:
        """A tensor from the window, or read now, before those that are only expected."""
        self._let_go(self._group.get(name, 0))
        future = self._window.get(name)
        if future is None:
            if name in self._ahead:
                self._ahead.remove(name)
            future = self._begin(name)
        else:
            self._drop(name)
        self._fill()
        return future.result()

    def _let_go(self, group: int) -> None:
        """Drop what is there, or expected, of earlier groups."""
        for name in [name for name in self._window if self._group[name] < group]:
            self._drop(name)
        while self._ahead and self._group[self._ahead[0]] < group:
            self._ahead.popleft()

    def _fill(self) -> None:
        """Begin to read what is expected, as much as there is room for."""
        while self._ahead:
            num_bytes = self._checkpoint.place(self._ahead[0]).num_bytes
            if self._window and self._window_bytes + num_bytes > WINDOW_BYTES:
                return
            name = self._ahead.popleft()
            self._window[name] = self._begin(name)
            self._window_bytes += num_bytes

    def _drop(self, name: str) -> None:
        """Take a tensor out of the window."""
        del self._window[name]
        self._window_bytes -= self._checkpoint.place(name).num_bytes

    def _begin(self, name: str) -> Future[_Whole]:
        place = self._checkpoint.place(name)
        if place.path not in self._files:
            try:
                descriptor = os.open(place.path, os.O_RDONLY)
            except OSError as error:
                raise ModelError(f"{place.path.name}: can't be read ({error.strerror})") from error
            self._stack.callback(os.close, descriptor)
            self._files[place.path] = DescriptorBytes(descriptor, place.path.name)
        return self._threads.submit(self._read, name, self._files[place.path], place.offset, place.num_bytes)

    def _read(self, name: str, file: DescriptorBytes, offset: int, num_bytes: int) -> _Whole:
        """Read a tensor, on one of the threads."""
        whole, digest = self._staging.allocate(num_bytes), xxhash.xxh3_128()
        for begin in range(0, num_bytes, PIECE_BYTES):
            with self._staging.piece(whole[begin : begin + PIECE_BYTES]) as memory:
                try:
                    file.read_into(offset + begin, memory.data)
                except ModelError as error:
                    raise ModelError(f"{name}: {error}") from error
                digest.update(memory.data)
        return _Whole(whole, digest.digest())
