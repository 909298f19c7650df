"""Safetensors are read by slice; anything else is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from rigs.adapter_bad import content_of, entry
from safetensors.torch import save_file

from deltaline_server.checkpoints.checkpoint import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    SINGLE_FILE,
    Checkpoint,
    TensorInfo,
)
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.models.config import ModelConfig

ALL = slice(None)


def write_shards(directory: Path, files: dict[str, str]) -> dict[str, torch.Tensor]:
    """Write one tensor per name into its file, and the index."""
    tensors = {name: torch.randn(6, 4) for name in files}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, directory / file)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    return tensors


def test_a_single_file_is_read_by_slice(tmp_path: Path) -> None:
    matrix, vector = torch.randn(6, 4), torch.randn(5, dtype=torch.bfloat16)
    save_file({"matrix": matrix, "vector": vector}, tmp_path / SINGLE_FILE)
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names) == {"matrix", "vector"}
        assert checkpoint.info("vector") == TensorInfo(SINGLE_FILE, (5,), "BF16")
        assert torch.equal(checkpoint.read("matrix", slice(1, 3), slice(2, 4)), matrix[1:3, 2:4])
        assert torch.equal(checkpoint.read("vector", slice(2, 4), ALL), vector[2:4])


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    """Those that nobody asks for may be absent; a tensor that the index promises must be in its file."""
    files = {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}
    tensors = write_shards(tmp_path, files)
    (tmp_path / "three.safetensors").unlink()
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": files | {"d": "one.safetensors"}}))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.info("b").file == "two.safetensors"
        assert all(torch.equal(checkpoint.read(name, ALL, ALL), tensors[name]) for name in "ab")
        for name, message in (
            ("c", r"^three\.safetensors: can't be read"),
            ("d", r"^d: expected in one\.safetensors"),
            ("e", r"^e: expected in the checkpoint"),
        ):
            with pytest.raises(ModelError, match=message):
                checkpoint.info(name)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_and_named(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"cos\nsystem\n")
    with pytest.raises(
        ModelError, match=f"expected {SINGLE_FILE} or .*{file} can run code.*: convert it with .*weights_only=True"
    ):
        Checkpoint(tmp_path)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"found neither$"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        *("../model.safetensors", "sub/model.safetensors", "/model.safetensors", "a.bin", "", 3),
        *("a\0.safetensors", "\ud800.safetensors", "a" * 256 + ".safetensors"),
    ],
)
def test_an_index_stays_in_its_directory(tmp_path: Path, file: object) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match=r"expected the name of a safetensors file for 'a', got .{1,80}$"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, partial(os.symlink, "/dev/zero"), os.mkdir], ids=["fifo", "device", "dir"])
def test_nothing_but_regular_files_is_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Reading the first two would never end."""
    write_shards(tmp_path, {"a": "one.safetensors"})
    (tmp_path / "one.safetensors").unlink()
    make(tmp_path / "one.safetensors")
    make(tmp_path / "config.json")
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match=r"^one\.safetensors: expected a regular"):
        checkpoint.info("a")
    with pytest.raises(ModelError, match=r"^config\.json: expected a regular file, got something else$"):
        ModelConfig.from_directory(tmp_path)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(ModelError, match="expected a weight_map"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [(MAX_HEADER_BYTES + 1).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"{}      "],
    ids=["above-the-cap", "beyond-the-file"],
)
def test_header_lengths_are_checked_before_anything_is_parsed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=rf"^{SINGLE_FILE}: expected a header within"):
        Checkpoint(tmp_path)


def test_a_header_above_the_cap_is_refused_in_a_file_that_would_hold_it(tmp_path: Path) -> None:
    with (tmp_path / SINGLE_FILE).open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 16)  # sparse: takes no space
    with pytest.raises(ModelError, match=rf"^{SINGLE_FILE}: expected a header within .* got {MAX_HEADER_BYTES + 1}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", r"at least 8 bytes \(the length of their header\), got 0$"),
        (b"\x08", r"at least 8 bytes \(the length of their header\), got 1$"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            r"got a Git LFS pointer to them: fetch the file \(git lfs pull\)$",
        ),
        (content_of(b"garbage!"), r"got something else \(.*invalid JSON in header.*\)$"),
        (content_of({"a": entry([2], 0, 8)}, b"\0" * 7), r"got something else \(.*file not fully covered\)$"),
        (content_of({"a": entry([1], 0, 4, "x\n" * 300)}, b"\0" * 4), r"got something else \(.{197}\.\.\.\)$"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused_with_the_reason(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=rf"^{SINGLE_FILE}: expected safetensors, {told}") as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path) not in str(caught.value)
