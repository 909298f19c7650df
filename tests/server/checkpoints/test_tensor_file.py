"""A hostile safetensors file is refused by its header; a sound one is read as the format's own library reads it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rigs.adapter_bad import BAD_FILES, content_of, entry
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save

from deltaline_server.checkpoints import tensor_file
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.tensor_file import DescriptorBytes, MemoryBytes, TensorFile


def file_of(content: bytes) -> TensorFile:
    return TensorFile(MemoryBytes(bytearray(content), "adapter_model.safetensors"))


def whole(file: TensorFile, name: str) -> torch.Tensor:
    return file.tensor(name, bytearray().join(file.pieces(name)))


def test_tensors_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(6, 4), "b": torch.randn(5).bfloat16(), "c": torch.randn(1, 3).half()}
    content = save(tensors, {"format": "pt"})
    path = tmp_path / "x"
    path.write_bytes(content)
    with path.open("rb") as opened:
        for file in (file_of(content), TensorFile(DescriptorBytes(opened.fileno(), "x"))):
            assert set(file.names) == set(tensors)
            assert file.info("b").shape == (5,) and file.info("b").dtype == "BF16"
            assert all(torch.equal(whole(file, name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused(case: str) -> None:
    with pytest.raises(ModelError, match="expected"):
        file_of(BAD_FILES[case])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x01", r"at least 8 bytes \(the length of their header\), got 1$"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            r"got a Git LFS pointer to them: fetch the file \(git lfs pull\)$",
        ),
        (content_of(b"garbage!"), r"got something else \(Expecting value: line 1 column 1 \(char 0\)\)$"),
        (content_of(b'{"\xff":1}'), r"got something else \('utf-8' codec can't decode byte 0xff in position 2: .*\)$"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(content: bytes, told: str) -> None:
    with pytest.raises(ModelError, match=rf"^adapter_model\.safetensors: expected safetensors\b.*, {told}"):
        file_of(content)


def test_a_file_that_was_cut_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(save({"a": torch.randn(1000)}))
    with path.open("rb") as opened:
        file = TensorFile(DescriptorBytes(opened.fileno(), "x"))
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(ModelError, match=r"^x: expected \d+ bytes, got \d+$"):
            list(file.pieces("a"))


def test_a_sparse_file_of_terabytes_is_refused_at_once(tmp_path: Path) -> None:
    size = 1 << 41
    path = tmp_path / "x"
    path.write_bytes(content_of({"a": entry([1 << 20, 1 << 19], 0, size)}))
    try:
        os.truncate(path, path.stat().st_size + size)  # sparse: takes no space
    except OSError as error:
        pytest.skip(f"no such files here: {error.strerror}")
    with path.open("rb") as opened, pytest.raises(ModelError, match="expected safetensors of at most"):
        TensorFile(DescriptorBytes(opened.fileno(), "x"))


def test_a_tensor_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 7)
    tensor = torch.randn(5, 3)
    file = file_of(save({"a": tensor, "b": torch.randn(2)}))
    assert [len(piece) for piece in file.pieces("a")] == [7] * 8 + [4]
    assert torch.equal(whole(file, "a"), tensor)


SOUND = save({"first": torch.arange(6.0).reshape(2, 3), "second": torch.arange(4.0).bfloat16()}, {"format": "pt"})


@given(st.integers(0, len(SOUND) - 33), st.binary(min_size=1, max_size=3), st.booleans())
@settings(max_examples=200, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_taken_the_formats_library_takes_alike(place: int, patch: bytes, is_cut: bool) -> None:
    content = SOUND[:place] + patch + SOUND[place + len(patch) :]
    content = content[:-1] if is_cut else content
    try:
        file = file_of(content)
    except ModelError:
        return
    try:
        theirs = load_safetensors(content)
    except SafetensorError as error:
        raise AssertionError("taken, but no safetensors") from error
    assert set(file.names) == set(theirs)
    for name in file.names:
        ours = whole(file, name)
        assert ours.dtype == theirs[name].dtype and ours.shape == theirs[name].shape
        assert b"".join(file.pieces(name)) == theirs[name].view(torch.uint8).numpy().tobytes()
