"""The fingerprint: the same for the same weights and settings on every rank, and another for any others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.small_models import GATED_DELTA_NET, HYBRID, MAMBA2
from safetensors.torch import save_file

from deltaline_server.checkpoints.checkpoint import TensorInfo
from deltaline_server.checkpoints.fingerprint import HashedTensors, fingerprint
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.model import ModelOptions, load_model
from deltaline_server.models.weights import random_init

CPU = torch.device("cpu")


def write_model(
    folder: Path, config: dict[str, Any], seed: int = 0, change: Callable[[Any], None] | None = None
) -> Path:
    """A checkpoint with the weights that a seed draws."""
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    source = random_init(ModelConfig.from_file(path), range(2), Scope.BLOCK, seed)
    tensors = {name: source.read(name, slice(None), slice(None)).contiguous() for name in source.names}
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def fingerprint_of(model: Path, state_dtype: torch.dtype = torch.float32, version: int = 1, **options: Any) -> bytes:
    return load_model(ModelOptions(CPU, model=model, **options)).fingerprint(state_dtype, version)


@pytest.mark.parametrize("config", [GATED_DELTA_NET, MAMBA2, HYBRID], ids=["gated_delta", "mamba2", "hybrid"])
def test_ranks_of_any_world_have_the_same(tmp_path: Path, config: dict[str, Any]) -> None:
    model = write_model(tmp_path / "model", config)
    scope = Scope.MIXER if config is MAMBA2 else Scope.BLOCK
    worlds = [(0, 1)] if config is MAMBA2 else [(0, 1), (0, 2), (1, 2)]
    found = {fingerprint_of(model, scope=scope, rank=rank, world_size=size) for rank, size in worlds}
    assert len(found) == 1 and {len(each) for each in found} == {32}


def test_what_changes_the_meaning_of_states_changes_it(tmp_path: Path) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.linear_attn.out_proj.weight"].view(torch.uint8)[-1, -1] ^= 1

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    model = write_model(tmp_path / "model", GATED_DELTA_NET)
    others = [
        write_model(tmp_path / "flipped", GATED_DELTA_NET, change=flip),
        write_model(tmp_path / "renamed", GATED_DELTA_NET, change=rename),
        write_model(tmp_path / "seeded", GATED_DELTA_NET, seed=1),
        write_model(tmp_path / "eps", GATED_DELTA_NET | {"rms_norm_eps": 1e-5}),
    ]
    found = [
        fingerprint_of(model),
        fingerprint_of(model, torch.bfloat16),
        fingerprint_of(model, version=2),
        fingerprint_of(model, dtype=torch.bfloat16),
        fingerprint_of(model, scope=Scope.MIXER),
        fingerprint_of(model, spans=[range(0, 1), range(1, 2)]),
        fingerprint_of(model, layers=range(0, 1)),
        *map(fingerprint_of, others),
    ]
    assert len(set(found)) == len(found)


def test_what_does_not_change_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", HYBRID)
    again = write_model(tmp_path / "again", HYBRID, change=lambda tensors: tensors.update(extra=torch.ones(3)))
    assert fingerprint_of(model) == fingerprint_of(again) == fingerprint_of(model, max_context=100, seed=5)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [GATED_DELTA_NET, MAMBA2, HYBRID], ids=["gated_delta", "mamba2", "hybrid"])
def test_a_gpu_reads_the_same(tmp_path: Path, config: dict[str, Any]) -> None:
    """By other ways: ahead, by several threads, in the order of the files."""
    model = write_model(tmp_path / "model", config)
    scope = Scope.MIXER if config is MAMBA2 else Scope.BLOCK
    here, there = (
        load_model(ModelOptions(torch.device(device), model=model, scope=scope)) for device in ("cpu", "cuda")
    )
    assert here.fingerprint(torch.float32, 1) == there.fingerprint(torch.float32, 1)


def test_a_seed_stands_for_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GATED_DELTA_NET))

    def found(seed: int) -> bytes:
        return load_model(ModelOptions(CPU, random_init=path, seed=seed)).fingerprint(torch.float32, 1)

    assert found(0) == found(0) != found(1)
    assert found(0) != fingerprint_of(write_model(tmp_path / "model", GATED_DELTA_NET))


class Counted:
    """Two tensors, and how often each was read."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, slice, slice]] = []

    @property
    def names(self) -> list[str]:
        return ["a", "b"]

    def info(self, name: str) -> TensorInfo:
        return TensorInfo("", (4, 3) if name == "a" else (5,), "BF16")

    def read(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        self.reads.append((name, rows, columns))
        values = torch.arange(12).reshape(4, 3) if name == "a" else torch.arange(5)
        return values.to(torch.bfloat16)


def test_a_tensor_is_read_whole_and_once_for_all_its_parts() -> None:
    source = Counted()
    hashed = HashedTensors(source)
    assert hashed.read("a", slice(1, 3), slice(0, 2)).tolist() == [[3, 4], [6, 7]]
    assert hashed.read("a", slice(None), slice(2, 3)).tolist() == [[2], [5], [8], [11]]
    assert hashed.read("b", slice(3, 5), slice(None)).tolist() == [3, 4]
    assert [name for name, _, _ in source.reads] == ["a", "b"]
    names = [each[:3] for each in hashed.identity()]
    assert names == [["a", [4, 3], "BF16"], ["b", [5], "BF16"]]


def test_the_order_of_keys_is_nothing() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1}) != fingerprint({"a": 1, "b": [3]})
    assert np.frombuffer(fingerprint({}), dtype=np.uint8).shape == (32,)
