"""Blocks that layers share, with low-rank matrices of each use."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import TensorInfo
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.shared_blocks import SharedBlocks

ALL = slice(None)
USERS = [1, 3, 4]
BLOCK = "shared_transformer."
MLP, ADAPTERS = f"{BLOCK}feed_forward.gate_up_proj.weight", f"{BLOCK}feed_forward.gate_up_proj_adapter_list"


class Tensors:
    """Tensors in memory, a TensorSource."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    @property
    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        return TensorInfo("file", tuple(self.tensors[name].shape), "F32")

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        whole = self.tensors[name]
        return whole[rows] if whole.ndim == 1 else whole[rows, columns]


@pytest.fixture
def stored() -> dict[str, Tensor]:
    """Two blocks, of layers 1 and 3; layer 4 uses the first one again."""
    tensors = {"model.norm.weight": torch.randn(4), "model.layers.0.mamba.D": torch.randn(2)}
    for first, uses in ((1, (0, 2)), (3, (1,))):
        tensors[f"model.layers.{first}.{MLP}"] = torch.randn(6, 4)
        tensors[f"model.layers.{first}.{BLOCK}input_layernorm.weight"] = torch.randn(8)
        for use in uses:
            tensors[f"model.layers.{first}.{ADAPTERS}.{use}.0.weight"] = torch.randn(2, 4)
            tensors[f"model.layers.{first}.{ADAPTERS}.{use}.1.weight"] = torch.randn(6, 2)
    return tensors


def shared(tensors: dict[str, Tensor]) -> SharedBlocks:
    return SharedBlocks(Tensors(tensors), USERS, 2, attention_adapters=False)


def test_each_use_has_the_block_with_its_own_matrices(stored: dict[str, Tensor]) -> None:
    source = shared(stored)
    own = {f"model.layers.{i}.{BLOCK}{name}" for i in USERS for name in ("input_layernorm.weight", MLP[len(BLOCK) :])}
    assert set(source.names) == own | {"model.norm.weight", "model.layers.0.mamba.D"}
    for use, layer in enumerate(USERS):
        first = USERS[use % 2]
        a, b = (stored[f"model.layers.{first}.{ADAPTERS}.{use}.{i}.weight"] for i in (0, 1))
        expected, name = stored[f"model.layers.{first}.{MLP}"] + b @ a, f"model.layers.{layer}.{MLP}"
        assert source.info(name).shape == (6, 4)
        torch.testing.assert_close(source.read(name, ALL, ALL), expected)
        torch.testing.assert_close(source.read(name, slice(2, 5), slice(1, 3)), expected[2:5, 1:3])
        norm = f"{BLOCK}input_layernorm.weight"
        assert torch.equal(
            source.read(f"model.layers.{layer}.{norm}", ALL, ALL), stored[f"model.layers.{first}.{norm}"]
        )
    assert torch.equal(source.read("model.norm.weight", ALL, ALL), stored["model.norm.weight"])
    parts = [part for name in source.names for part in source.stored(name)]
    assert set(parts) == stored.keys() and len(parts) == len(stored) + 2, "of layer 4 what is layer 1's"


def test_a_layer_that_has_a_block_of_its_own_uses_that(stored: dict[str, Tensor]) -> None:
    own = {f"model.layers.4.{name}": tensor for name, tensor in ((MLP, torch.randn(6, 4)),)}
    own |= {f"model.layers.4.{ADAPTERS}.2.{i}.weight": torch.randn(size) for i, size in enumerate([(2, 4), (6, 2)])}
    a, b = (own[f"model.layers.4.{ADAPTERS}.2.{i}.weight"] for i in (0, 1))
    read = shared(stored | own).read(f"model.layers.4.{MLP}", ALL, ALL)
    torch.testing.assert_close(read, own[f"model.layers.4.{MLP}"] + b @ a)


def test_what_is_wrong_with_low_rank_matrices_is_named(stored: dict[str, Tensor]) -> None:
    name = f"model.layers.1.{ADAPTERS}.2.0.weight"
    lacking = {key: tensor for key, tensor in stored.items() if key != name}
    with pytest.raises(ModelError, match=r"adapter_list\.2\.0\.weight: expected a low-rank matrix .*, found nothing"):
        shared(lacking).info(f"model.layers.4.{MLP}")
    with pytest.raises(ModelError, match=r"of a weight of shape \[6, 4\], got \[3, 4\] and \[6, 2\]"):
        shared(stored | {name: torch.randn(3, 4)}).info(f"model.layers.4.{MLP}")
    shared(stored | {name: torch.randn(3, 4)}).info(f"model.layers.1.{MLP}")
