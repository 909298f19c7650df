"""A hostile safetensors file is refused by its header; a sound one is read as the format's own library reads it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save

from deltaline_server.model_config import ModelError
from deltaline_server.tensor_file import MAX_HEADER_BYTES, DescriptorBytes, MemoryBytes, TensorFile

ALL = slice(None)


def file_of(content: bytes) -> TensorFile:
    return TensorFile(MemoryBytes(bytearray(content), "adapter_model.safetensors"))


def content_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[Any], begin: int, end: int, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_are_read_whole_and_in_part(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(6, 4), "b": torch.randn(5).bfloat16(), "c": torch.randn(1, 3).half()}
    content = save(tensors, {"format": "pt"})
    path = tmp_path / "x"
    path.write_bytes(content)
    with path.open("rb") as opened:
        for file in (file_of(content), TensorFile(DescriptorBytes(opened.fileno(), "x"))):
            assert set(file.names) == set(tensors)
            assert file.info("b").shape == (5,) and file.info("b").dtype == "BF16"
            assert all(torch.equal(file.read(name, ALL, ALL), tensor) for name, tensor in tensors.items())
            assert torch.equal(file.read("a", slice(1, 3), slice(2, 4)), tensors["a"][1:3, 2:4])
            assert torch.equal(file.read("b", slice(1, 3), ALL), tensors["b"][1:3])


BAD: dict[str, bytes] = {
    "empty": b"",
    "cut in the length": b"\x10\x00",
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a zip archive, as torch writes them": b"PK\x03\x04" + b"\x00" * 60,
    "a header of 2^40 bytes": (1 << 40).to_bytes(8, "little") + b"{}" * 50,
    "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}" * 50,
    "a header above the limit": (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * (MAX_HEADER_BYTES + 1),
    "a header of 100 MB": (100_000_000).to_bytes(8, "little") + b"{}" * 50,
    "a header longer than the file": (9).to_bytes(8, "little") + b"{}      ",
    "100,000 entries": content_of(b"{" + b",".join(b'"%d":0' % i for i in range(100_000)) + b"}"),
    "4,097 tensors": content_of({str(i): entry([1], 4 * i, 4 * i + 4) for i in range(4098)}, b"\0" * 4 * 4098),
    "no JSON": content_of(b"garbage!"),
    "deep JSON": content_of(b'{"a":' * 100_000),
    "no text": content_of(b'{"\xff":1}'),
    "a list": content_of([1]),
    "a number that is no number": content_of(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', b"\0" * 4),
    "a name twice": content_of(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"\0" * 4,
    ),
    "a name of another alphabet": content_of({"ä": entry([1], 0, 4)}, b"\0" * 4),
    "a name with a zero": content_of({"a\0b": entry([1], 0, 4)}, b"\0" * 4),
    "a long name": content_of({"a" * 513: entry([1], 0, 4)}, b"\0" * 4),
    "an entry that is no object": content_of({"a": 1}),
    "an entry without a shape": content_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"\0" * 4),
    "an entry with more": content_of({"a": entry([1], 0, 4) | {"x": 1}}, b"\0" * 4),
    "overlapping tensors": content_of({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12),
    "one place for two tensors": content_of({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, b"\0" * 8),
    "no bytes in a tensor": content_of({"a": entry([1], 0, 4), "b": entry([0, 4], 4, 4)}, b"\0" * 4),
    "two empty tensors in one place": content_of({"a": entry([0], 0, 0), "b": entry([0], 0, 0)}),
    "a hole": content_of({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12),
    "truncated": content_of({"a": entry([2], 0, 8)}, b"\0" * 7),
    "bytes that belong to nothing": content_of({"a": entry([2], 0, 8)}, b"\0" * 9),
    "offsets backwards": content_of({"a": entry([1], 4, 0)}, b"\0" * 4),
    "negative offsets": content_of({"a": entry([1], -4, 0)}, b"\0" * 4),
    "offsets above 2^64": content_of({"a": entry([1], 1 << 70, (1 << 70) + 4)}, b"\0" * 4),
    "a size that wraps in 64 bits": content_of({"a": entry([1 << 33, 1 << 33], 0, 0)}),
    "a size of terabytes": content_of({"a": entry([1 << 20, 1 << 20], 0, 1 << 42)}, b"\0" * 4),
    "a negative size": content_of({"a": entry([-1, -1], 0, 4)}, b"\0" * 4),
    "a size that is true": content_of({"a": entry([True], 0, 4)}, b"\0" * 4),
    "a fractional size": content_of({"a": entry([1.0], 0, 4)}, b"\0" * 4),
    "a scalar": content_of({"a": entry([], 0, 4)}, b"\0" * 4),
    "three dimensions": content_of({"a": entry([1, 1, 1], 0, 4)}, b"\0" * 4),
    "integers": content_of({"a": entry([1], 0, 4, "I32")}, b"\0" * 4),
    "doubles": content_of({"a": entry([1], 0, 8, "F64")}, b"\0" * 8),
    "a dtype that is no text": content_of({"a": entry([1], 0, 4, ["F32"])}, b"\0" * 4),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_at_once(case: str) -> None:
    begin_s = time.process_time()
    with pytest.raises(ModelError, match="expected"):
        file_of(BAD[case])
    assert time.process_time() - begin_s < 1.0


def test_a_file_that_was_cut_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(save({"a": torch.randn(1000)}))
    with path.open("rb") as opened:
        file = TensorFile(DescriptorBytes(opened.fileno(), "x"))
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(ModelError, match=r"^x: expected \d+ bytes, got \d+$"):
            file.content("a")


SOUND = save({"first": torch.arange(6.0).reshape(2, 3), "second": torch.arange(4.0).bfloat16()}, {"format": "pt"})


@given(st.integers(0, len(SOUND) - 33), st.binary(min_size=1, max_size=3), st.booleans())
@settings(max_examples=400, deadline=None, database=None)
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
        ours = file.read(name, ALL, ALL)
        assert ours.dtype == theirs[name].dtype and ours.shape == theirs[name].shape
        assert bytes(file.content(name)) == theirs[name].view(torch.uint8).numpy().tobytes()
