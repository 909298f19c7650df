"""Weights of layers in tests, as their families load them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deltaline_server.layers.block import Block
from deltaline_server.layers.mixers.gated_delta_net import GatedDeltaNet
from deltaline_server.layers.mlp import Mlp
from deltaline_server.layers.projection import Projection
from deltaline_server.models.weights import LayerLoader


class MixerWeights(NamedTuple):
    in_proj: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor


class BlockWeights(NamedTuple):
    input_norm: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def dense(projection: Projection) -> Tensor:
    """The weight of a projection that is in one piece, however it is kept."""
    [weight] = projection.weights
    assert isinstance(weight, Tensor)
    return weight.to_dense() if weight.is_mkldnn else weight


def mixer_weights(loader: LayerLoader, layer: int) -> MixerWeights:
    """The weights of a Gated DeltaNet mixer."""
    mixer = loader.mixer(layer, {})
    assert isinstance(mixer, GatedDeltaNet)
    vectors = mixer.conv, mixer.A_log, mixer.dt_bias, mixer.norm
    return MixerWeights(dense(mixer.in_proj), *vectors, dense(mixer.out_proj))


def block_weights(loader: LayerLoader, layer: int) -> BlockWeights:
    """What surrounds the mixer of a layer with an MLP."""
    block = loader.block(layer, {})
    assert isinstance(block, Block)
    before, behind = block.branches
    mlp = behind.inner
    assert isinstance(mlp, Mlp)
    return BlockWeights(before.norm, behind.norm, dense(mlp.gate_up), dense(mlp.down))
