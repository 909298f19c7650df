"""Weights of layers in tests, as their families load them."""

from __future__ import annotations

from deltaline_server.layers.block import BlockWeights, MlpBlocks
from deltaline_server.layers.gated_delta_net import GatedDeltaNetFamily, GatedDeltaNetWeights
from deltaline_server.models.config import MixerKind, ModelConfig
from deltaline_server.models.family import block_family, mixer_family
from deltaline_server.models.weights import LayerLoader


def mixer_weights(loader: LayerLoader, config: ModelConfig, layer: int) -> GatedDeltaNetWeights:
    """The weights of a Gated DeltaNet mixer."""
    family = mixer_family(config, MixerKind.GATED_DELTA_NET)
    assert isinstance(family, GatedDeltaNetFamily)
    return family.weights(loader.reader(layer))


def block_weights(loader: LayerLoader, config: ModelConfig, layer: int) -> BlockWeights:
    """What surrounds the mixer of a layer with an MLP."""
    family = block_family(config)
    assert isinstance(family, MlpBlocks)
    return family.weights(loader.reader(layer))
