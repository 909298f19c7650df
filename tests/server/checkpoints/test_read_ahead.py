"""A checkpoint is read ahead: the bytes of the files, in their order, within a bound, each read once."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from rigs.host_staging import HostStaging
from safetensors.torch import save_file
from torch import Tensor

from deltaline_server.checkpoints import read_ahead
from deltaline_server.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.read_ahead import ReadAhead
from deltaline_server.checkpoints.staging import CudaStaging
from deltaline_server.memory.pinning import CudaPinning, HostMemory

ALL = slice(None)


class AtOnce:
    """Threads that have done what they are given before they are left."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*arguments))
        return done

    def shutdown(self, **_: object) -> None:
        pass


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is begun is done at once, so that it can be counted."""
    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", AtOnce)


def write(folder: Path, *shards: dict[str, Tensor]) -> Checkpoint:
    """Shards, the first of which sorts last."""
    files = {f"{9 - i}.safetensors": shard for i, shard in enumerate(shards)}
    for file, shard in files.items():
        save_file(shard, folder / file)
    weight_map = {name: file for file, shard in files.items() for name in shard}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return Checkpoint(folder)


def tensors_of(sizes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    return {name: torch.randn(size).to(dtypes[i % 3]) for i, (name, size) in enumerate(sizes.items())}


SIZES: dict[str, tuple[int, ...]] = {"a": (40, 7), "b": (9,), "c": (3, 5, 11), "d": (1, 1), "e": (0, 4), "f": (128, 64)}


@pytest.mark.parametrize("piece_bytes", [8, 100, 4 << 20])
def test_parts_are_those_of_the_files_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", piece_bytes)
    stored = tensors_of(SIZES)
    names = list(stored)
    shards = {name: stored[name] for name in names[:3]}, {name: stored[name] for name in names[3:]}
    chance = random.Random(piece_bytes)
    with write(tmp_path, *shards) as checkpoint, ReadAhead(checkpoint, HostStaging()) as source:
        source.begin({0: names[:2], 1: names[2:]})
        for name in chance.sample(names * 2, 2 * len(names)):
            rows, columns = slice(1, 3), slice(0, 2)
            parts = (ALL, ALL), (rows, columns)
            for part in parts:
                expected = stored[name][part[0]] if stored[name].ndim == 1 else stored[name][part]
                found = source.read(name, *part)
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
        digests = {name: digest for name, _, _, digest in source.identity()}
        assert digests == {
            name: xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            for name, tensor in stored.items()
        }
        assert source.identity()[0][:3] == ["a", [40, 7], "BF16"]


def test_only_what_was_read_is_in_the_identity(tmp_path: Path) -> None:
    with write(tmp_path, tensors_of(SIZES)) as checkpoint, ReadAhead(checkpoint, HostStaging()) as source:
        source.begin({0: list(SIZES)})
        source.read("b", ALL, ALL)
        assert [name for name, *_ in source.identity()] == ["b"]


@pytest.mark.usefixtures("at_once")
def test_the_order_is_that_of_the_files(tmp_path: Path) -> None:
    """Of the groups too, whatever they are called and however they are asked for."""
    sizes = {"w": (1, 16), "x": (2, 16), "y": (3, 16), "z": (4, 16)}
    stored = {name: torch.ones(size) for name, size in sizes.items()}
    last, first = {name: stored[name] for name in "wx"}, {name: stored[name] for name in "yz"}
    staging = HostStaging()
    with write(tmp_path, last, first) as checkpoint, ReadAhead(checkpoint, staging) as source:
        assert source.begin({3: ["x", "w"], 7: ["z", "y"]}) == [7, 3]
        for name in "zywx":
            source.read(name, ALL, ALL)
    assert staging.begun == [64 * count for count in (3, 4, 1, 2)]


@pytest.mark.usefixtures("at_once")
def test_what_waits_is_bounded_and_what_is_passed_over_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 2 * 64)
    names = "abcdefgh"
    stored = {name: torch.full((16,), float(i)) for i, name in enumerate(names)}
    staging = HostStaging()
    with write(tmp_path, stored) as checkpoint, ReadAhead(checkpoint, staging) as source:
        source.begin({0: list("abcd"), 1: list("efgh")})
        assert len(staging.begun) == 2  # a, b
        assert source.read("a", ALL, ALL)[0] == 0
        assert len(staging.begun) == 3  # c
        assert source.read("d", ALL, ALL)[0] == 3  # not there yet: at once, beside b and c, which stay
        assert len(staging.begun) == 4
        assert source.read("e", ALL, ALL)[0] == 4  # of the next group: b and c go
        assert len(staging.begun) == 7  # e, f, g
        assert source.read("b", ALL, ALL)[0] == 1  # once more
        assert len(staging.begun) == 8
        for name in "fgh":
            assert source.read(name, ALL, ALL)[0] == names.index(name)
    assert len(staging.begun) == 9


@pytest.mark.usefixtures("at_once")
def test_a_tensor_beyond_the_bound_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 64)
    stored = {name: torch.full((1000,), float(i)) for i, name in enumerate("abc")}
    with write(tmp_path, stored) as checkpoint, ReadAhead(checkpoint, HostStaging()) as source:
        source.begin({0: list("abc")})
        assert [float(source.read(name, ALL, ALL)[999]) for name in "abc"] == [0, 1, 2]


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[ReadAhead]:
    """A source whose file was cut after it was opened and checked."""
    save_file({"a": torch.zeros(4), "b": torch.zeros(1000)}, tmp_path / SINGLE_FILE)
    with Checkpoint(tmp_path) as checkpoint, ReadAhead(checkpoint, HostStaging()) as source:
        os.truncate(tmp_path / SINGLE_FILE, checkpoint.place("b").offset + 100)
        yield source


def test_a_file_that_is_cut_meanwhile_is_an_error_that_names_the_tensor(cut: ReadAhead) -> None:
    cut.begin({0: ["a", "b"]})
    assert cut.read("a", ALL, ALL).tolist() == [0, 0, 0, 0]
    with pytest.raises(ModelError, match=r"^b: model\.safetensors: expected \d+ bytes, got \d+$"):
        cut.read("b", ALL, ALL)
    with pytest.raises(ModelError, match=r"^c: expected in the checkpoint"):
        cut.read("c", ALL, ALL)


def test_a_file_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / SINGLE_FILE)
    with Checkpoint(tmp_path) as checkpoint, ReadAhead(checkpoint, HostStaging()) as source:
        checkpoint.place("a")
        (tmp_path / SINGLE_FILE).unlink()
        with pytest.raises(ModelError, match=r"^model\.safetensors: can't be read \(No such file"):
            source.begin({0: ["a"]})


def test_its_end_leaves_nothing_open(tmp_path: Path) -> None:
    def descriptors() -> set[str]:
        return {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_there(name)}

    with write(tmp_path, {name: torch.zeros(1000) for name in "abcd"}) as checkpoint:
        source = ReadAhead(checkpoint, HostStaging())
        source.begin({0: list("abcd")})
        assert str(tmp_path / "9.safetensors") in descriptors()
        source.close()
        source.close()
        assert str(tmp_path / "9.safetensors") not in descriptors()


def _is_there(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


@pytest.mark.gpu
def test_a_device_has_the_bytes_of_the_files(tmp_path: Path) -> None:
    """Tensors of many pieces, and more of them than are on their way at once; each is spoilt when it is done with."""
    stored = {f"{i:02}": torch.randint(0, 1 << 30, (5 + i, 1 << 20), dtype=torch.int32) for i in range(12)}
    device = torch.device("cuda", torch.cuda.current_device())
    memory = HostMemory(CudaPinning(device))
    files = {name: tensor.view(torch.float32) for name, tensor in stored.items()}
    with write(tmp_path, files) as checkpoint, ReadAhead(checkpoint, CudaStaging(device, memory.allocate)) as source:
        source.begin({0: list(stored)})
        sums = {}
        for name in stored:
            whole = source.read(name, ALL, ALL)
            assert whole.device == device
            sums[name] = (whole.view(torch.int32).long().cumsum(1)[:, -1].clone(), whole.fill_(0.0))[0]
        assert all(torch.equal(sums[name].cpu(), tensor.long().sum(1)) for name, tensor in stored.items())
    memory.close()
