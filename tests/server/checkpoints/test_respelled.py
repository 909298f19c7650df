"""Tensors that are stored under other names or in parts, as what they are asked for by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import Checkpoint
from deltaline_server.checkpoints.modules import ALL
from deltaline_server.checkpoints.respelled import RespelledTensors

SPELLINGS = {"norm.weight": ("old_norm.weight",), "conv.weight": ("q_conv.weight", "k_conv.weight")}
NAME = "layers.0.conv.weight"


def write(folder: Path, **tensors: Tensor) -> RespelledTensors:
    """A source of these weights of layer 0."""
    save_file({f"layers.0.{name}.weight": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return RespelledTensors(Checkpoint(folder), SPELLINGS)


def test_a_name_and_parts_that_are_stored_are_what_is_asked_for(tmp_path: Path) -> None:
    q, k, norm, other = torch.randn(5, 1, 4), torch.randn(3, 1, 4), torch.randn(6), torch.randn(2, 2)
    source = write(tmp_path, q_conv=q, k_conv=k, old_norm=norm, other=other)
    assert set(source.names) == {NAME, "layers.0.norm.weight", "layers.0.other.weight"}
    assert (source.info(NAME).shape, source.info(NAME).dtype) == ((8, 1, 4), "F32")
    assert torch.equal(source.read(NAME, slice(4, 7), ALL), torch.cat((q, k))[4:7])
    assert torch.equal(source.read("layers.0.norm.weight", slice(2, 6), ALL), norm[2:])
    assert torch.equal(source.read("layers.0.other.weight", ALL, slice(1, 2)), other[:, 1:])


def test_what_has_its_name_is_left_as_it_is(tmp_path: Path) -> None:
    source = write(tmp_path, norm=torch.ones(6), old_norm=torch.zeros(6))
    assert set(source.names) == {"layers.0.norm.weight", "layers.0.old_norm.weight"}
    assert torch.equal(source.read("layers.0.norm.weight", ALL, ALL), torch.ones(6))


def test_parts_of_which_one_is_missing_are_not_the_whole(tmp_path: Path) -> None:
    assert set(write(tmp_path, q_conv=torch.ones(5, 1, 4)).names) == {"layers.0.q_conv.weight"}


@pytest.mark.parametrize(
    ("k", "told"),
    [(torch.ones(3, 1, 3), ((5, 1, 4), "F32")), (torch.ones(3, 1, 4).half(), ((8, 1, 4), "F16 and F32"))],
    ids=["shape", "dtype"],
)
def test_parts_that_do_not_fit_are_not_told_as_a_whole(tmp_path: Path, k: Tensor, told: tuple[object, str]) -> None:
    info = write(tmp_path, q_conv=torch.ones(5, 1, 4), k_conv=k).info(NAME)
    assert (info.shape, info.dtype) == told
