"""Where weights come from: a directory of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltaline_server.checkpoints.config_reader import ModelError, file_bytes, read_json_object
from deltaline_server.errors import shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# How a file that is never read becomes one that is: by who trusts it, elsewhere.
CONVERT = "convert it with torch.load(path, weights_only=True) and safetensors.torch.save_file"
MAX_INDEX_BYTES = 256 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1_000_000
DTYPES = ("F32", "BF16", "F16")
# Of weights that have scales.
FP8 = "F8_E4M3"
# Of scales that are powers of 2.
E8M0 = "F8_E8M0"
MAX_FILE_NAME_CHARS = 255
LENGTH_BYTES = 8
# What a clone without Git LFS has in the place of a file.
LFS_POINTER = b"version https://git-lfs"
# The entry of a header that is no tensor.
METADATA = "__metadata__"
MAX_REASON_CHARS = 200


class StoredFp8(Protocol):
    """A weight in e4m3 as it is stored. block: rows and columns of it, or of each of a stack, that have one scale."""

    @property
    def block(self) -> tuple[int, int]: ...

    def read(self, rows: slice, columns: slice) -> Tensor:
        """Read a part as TensorSource.read does, the bytes of its values: uint8."""

    def read_scales(self) -> Tensor:
        """Read the scales of all blocks, of every matrix `[block rows, block columns]`: fp32."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is and what it is: the file's own name, its shape, its dtype as safetensors spells it.

    fp8: of one that is in e4m3 and read as what it stands for, the same as it is stored.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    fp8: StoredFp8 | None = None


@dataclass(frozen=True, order=True)
class TensorPlace:
    """Where a tensor's bytes are. Places are ordered as files are read: one by one, each from its beginning."""

    path: Path
    offset: int
    num_bytes: int


class TensorSource(Protocol):
    """What weights.py reads from."""

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors."""

    def info(self, name: str) -> TensorInfo:
        """Tell about a tensor without reading it."""

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a part of a tensor: `rows` of its first dimension, `columns` of its second where it has two."""


def part_of(whole: Tensor, rows: slice, columns: slice) -> Tensor:
    """A part of a tensor that was read whole, which shares its memory; of a scalar all."""
    if whole.ndim < 2:
        return whole[rows] if whole.ndim else whole
    return whole[rows, columns]


class Checkpoint:
    """A directory of safetensors: `model.safetensors`, or the files that `model.safetensors.index.json` names.

    Files are opened when a tensor of theirs is asked for, and closed by `close` (it is a context manager).
    """

    def __init__(self, directory: Path) -> None:
        """Raises ModelError: no safetensors, an index that is not sound, or more than MAX_TENSORS tensors."""
        self._directory = directory
        self._handles: dict[str, Any] = {}
        self._places: dict[str, dict[str, TensorPlace]] = {}
        self._stack = ExitStack()
        if (directory / SINGLE_FILE).is_file():
            self._files = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        elif (directory / INDEX_FILE).is_file():
            self._files = _read_index(directory / INDEX_FILE)
        else:
            others = sorted(path.name for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
            why = "can run code when it is loaded and is never read"
            but = f"; {', '.join(others[:3])} {why}: {CONVERT}" if others else ""
            raise ModelError(f"--model: expected {SINGLE_FILE} or {INDEX_FILE} in the directory, found neither{but}")

    @property
    def names(self) -> Iterable[str]:
        return self._files.keys()

    def info(self, name: str) -> TensorInfo:
        """Tell about a tensor. Raises ModelError if it is not there or its file is not sound."""
        part = self._slice(name)
        return TensorInfo(self._files[name], tuple(part.get_shape()), part.get_dtype())

    def place(self, name: str) -> TensorPlace:
        """Tell where a tensor's bytes are. Raises ModelError as `info`."""
        self._slice(name)  # which has the format's own library check the file
        file = self._files[name]
        if file not in self._places:
            self._places[file] = _read_places(self._directory / file)
        return self._places[file][name]

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read a part of a tensor from its file; nothing else of it is read."""
        part = self._slice(name)
        tensor: Tensor
        match len(part.get_shape()):
            case 0:
                tensor = self._open(self._files[name]).get_tensor(name)
            case 1:
                tensor = part[rows]
            case _:
                tensor = part[rows, columns]
        return tensor

    def close(self) -> None:
        """Close the files."""
        self._handles.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slice(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{name}: expected in the checkpoint, found nothing")
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{name}: expected in {file}, found nothing") from error

    def _open(self, file: str) -> Any:
        handle = self._handles.get(file)
        if handle is None:
            path = self._directory / file
            _check_header(path)
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ModelError(f"{file}: expected safetensors, got something else ({parse_reason(error)})") from error
            except OSError as error:  # its text has the path
                raise ModelError(f"{file}: expected safetensors, which can't be opened") from error
            if len(handle.keys()) > MAX_TENSORS:
                raise ModelError(f"{file}: expected at most {MAX_TENSORS} tensors, got {len(handle.keys())}")
            self._handles[file] = handle
        return handle


def _read_index(path: Path) -> dict[str, str]:
    """Read tensor name -> file name. Raises ModelError."""
    files = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(files, dict) or len(files) > MAX_TENSORS:
        raise ModelError(f"{path.name}: expected a weight_map of at most {MAX_TENSORS} tensors")
    for name, file in files.items():
        # Printable: no zero, which ends a path, and nothing that the system's encoding has no bytes for.
        is_name = isinstance(file, str) and len(file) <= MAX_FILE_NAME_CHARS and file.isprintable()
        if not is_name or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{path.name}: expected the name of a safetensors file for {shown(name)}, got {shown(file)}"
            )
    return files


def header_length(name: str, start: bytes) -> int:
    """Return how long a file says that its header is. start: as many bytes as LFS_POINTER has, fewer of a shorter file.

    Raises ModelError unless it may begin as safetensors do.
    """
    if len(start) < LENGTH_BYTES:
        expected = f"safetensors, at least {LENGTH_BYTES} bytes (the length of their header)"
        raise ModelError(f"{name}: expected {expected}, got {len(start)}")
    if start == LFS_POINTER:
        raise ModelError(f"{name}: expected safetensors, got a Git LFS pointer to them: fetch the file (git lfs pull)")
    return int.from_bytes(start[:LENGTH_BYTES], "little")


def parse_reason(error: Exception) -> str:
    """What a reader says is wrong, in one line and cut short: it may repeat what is in the file."""
    text = "".join(character if character.isprintable() else " " for character in str(error))
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 3] + "..."


def _check_header(path: Path) -> None:
    """Raise ModelError unless the file's header is within its file and the cap, before anything parses it."""
    size = file_bytes(path)
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise ModelError(f"{path.name}: can't be read ({error.strerror})") from error
    length = header_length(path.name, start)
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise ModelError(f"{path.name}: expected a header within the file and {MAX_HEADER_BYTES} bytes, got {length}")


def _read_places(path: Path) -> dict[str, TensorPlace]:
    """Read where the tensors of a file are, whose header was checked. Raises ModelError."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path.name}: can't be read ({error.strerror})") from error
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != METADATA}
    data = LENGTH_BYTES + length
    return {name: TensorPlace(path, data + begin, end - begin) for name, (begin, end) in offsets.items()}
