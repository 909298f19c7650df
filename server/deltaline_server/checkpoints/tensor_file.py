"""A safetensors file from a client: its header is checked in full before any tensor is read.

Stricter than the format: limits on the header and on the number of tensors, no empty tensors, every byte belongs to
exactly one tensor. Reads a part of a file at a time, from memory or from a descriptor, and maps nothing: a file that is
cut short meanwhile is an error, not a signal. (The format's own library checks only whole files, in memory or mapped.)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import (
    LENGTH_BYTES,
    LFS_POINTER,
    METADATA,
    TensorInfo,
    header_length,
    parse_reason,
)
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.errors import shown

MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 4096
MAX_NAME_CHARS = 512
# A file may be sparse and take no space; reading it takes time all the same.
MAX_FILE_BYTES = 4 << 30
PIECE_BYTES = 4 << 20
MAX_DIMENSIONS = 2
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Bytes(Protocol):
    """Where a file's bytes are."""

    name: str
    """What messages call the file."""
    size: int

    def read(self, offset: int, size: int) -> bytearray:
        """Return `size` bytes from `offset`. Raises ModelError if they are not there."""


class MemoryBytes:
    """Bytes that came in messages."""

    def __init__(self, content: bytearray, name: str) -> None:
        self._content, self.name, self.size = content, name, len(content)

    def read(self, offset: int, size: int) -> bytearray:
        part = self._content[offset : offset + size]
        if len(part) != size:
            raise ModelError(f"{self.name}: expected {offset + size} bytes, got {self.size}")
        return part


class DescriptorBytes:
    """The bytes of an open regular file, which the caller closes. size: when this was made."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self.name, self.size = descriptor, name, os.fstat(descriptor).st_size

    def read(self, offset: int, size: int) -> bytearray:
        part = bytearray(size)
        self.read_into(offset, memoryview(part))
        return part

    def read_into(self, offset: int, part: memoryview) -> None:
        """Fill `part` with the bytes from `offset`. Raises ModelError if they are not there. Threads may share this."""
        size, done = len(part), 0
        while done < size:
            try:
                count = os.preadv(self._descriptor, [part[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"{self.name}: can't be read ({error.strerror})") from error
            if count == 0:
                raise ModelError(f"{self.name}: expected {offset + size} bytes, got {offset + done}")
            done += count


class TensorFile:
    """The tensors of one file, read when asked for."""

    def __init__(self, content: Bytes) -> None:
        """Raises ModelError: the header is too large, or is not what a header has to be."""
        self._content = content
        self._begin, self._offsets, self._infos = 0, dict[str, int](), dict[str, TensorInfo]()
        header = self._read_header()
        if len(header) > MAX_TENSORS + 1:
            raise ModelError(f"{content.name}: expected at most {MAX_TENSORS} tensors, got {len(header)}")
        spans = [self._add(name, entry) for name, entry in header.items() if name != METADATA]
        end = 0
        for begin, next_begin, name in sorted(spans):
            if begin != end:
                raise self._wrong(name, f"data_offsets that begin at {end}, where the data before it ends", begin)
            end = next_begin
        if self._begin + end != content.size:
            raise ModelError(f"{content.name}: expected {self._begin + end} bytes, got {content.size}")

    @property
    def names(self) -> Iterable[str]:
        return self._infos.keys()

    def info(self, name: str) -> TensorInfo:
        """Tell about a tensor of `names`."""
        return self._infos[name]

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor of `names`."""
        return _size(self._infos[name])

    def pieces(self, name: str) -> Iterator[bytearray]:
        """Read the bytes of a tensor of `names`, PIECE_BYTES at a time. Raises ModelError if they can't be read."""
        begin, size = self._begin + self._offsets[name], self.num_bytes(name)
        for at in range(0, size, PIECE_BYTES):
            yield self._content.read(begin + at, min(PIECE_BYTES, size - at))

    def tensor(self, name: str, content: bytearray) -> Tensor:
        """Return the tensor that has these bytes, which it shares."""
        info = self._infos[name]
        return torch.frombuffer(content, dtype=TORCH_DTYPES[info.dtype]).reshape(info.shape)

    def _read_header(self) -> dict[str, Any]:
        """Read and parse the header; sets where the data begins."""
        content = self._content
        start = bytes(content.read(0, min(content.size, len(LFS_POINTER))))
        length = header_length(content.name, start)
        if content.size > MAX_FILE_BYTES:
            raise ModelError(
                f"{content.name}: expected safetensors of at most {MAX_FILE_BYTES} bytes, got {content.size}"
            )
        limit = min(MAX_HEADER_BYTES, content.size - LENGTH_BYTES)
        if length > limit:
            raise ModelError(
                f"{content.name}: expected safetensors with a header of at most {limit} bytes, got {length}"
            )
        self._begin = LENGTH_BYTES + length
        try:
            header = json.loads(content.read(LENGTH_BYTES, length), object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ModelError):
                raise
            why = f"got something else ({parse_reason(error)})"
            raise ModelError(f"{content.name}: expected safetensors with a header in JSON, {why}") from error
        if not isinstance(header, dict):
            raise ModelError(f"{content.name}: expected safetensors with an object as header, got {shown(header)}")
        return header

    def _add(self, name: str, entry: Any) -> tuple[int, int, str]:
        """Check an entry of the header and keep it; returns begin and end of its data, and its name."""
        if len(name) > MAX_NAME_CHARS or not name.isascii() or not name.isprintable():
            raise ModelError(f"{self._content.name}: expected printable ASCII names, got {shown(name)}")
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._wrong(name, "dtype, shape and data_offsets", entry)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
            raise self._wrong(name, f"dtype {' or '.join(TORCH_DTYPES)}", dtype)
        if not _are_counts(shape) or not 1 <= len(shape) <= MAX_DIMENSIONS or 0 in shape:
            raise self._wrong(name, f"1 .. {MAX_DIMENSIONS} dimensions of 1 or more", shape)
        info = TensorInfo(self._content.name, tuple(shape), dtype)
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != _size(info):
            raise self._wrong(name, f"data_offsets {_size(info)} bytes apart", offsets)
        self._infos[name], self._offsets[name] = info, offsets[0]
        return offsets[0], offsets[1], name

    def _wrong(self, name: str, expected: str, got: object) -> ModelError:
        return ModelError(f"{shown(name)}: expected {expected}, got {shown(got)}")


def _size(info: TensorInfo) -> int:
    """Bytes of a tensor, a Python integer that can't wrap."""
    return math.prod(info.shape) * TORCH_DTYPES[info.dtype].itemsize


def _are_counts(values: object) -> bool:
    """Whether this is a list of integers from 0 to 2^53."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= 1 << 53 for value in values)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different. Raises ModelError for one that has a key twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ModelError("header: expected every key once, got one twice")
    return made
