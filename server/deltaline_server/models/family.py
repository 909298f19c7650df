"""What the layers of a model are made of: the families of its mixers and of the blocks around them."""

from __future__ import annotations

from deltaline_server.checkpoints.modules import Module
from deltaline_server.layers.attention import AttentionFamily
from deltaline_server.layers.block import MlpBlocks, PlainBlocks
from deltaline_server.layers.gated_delta_net import GatedDeltaNetFamily
from deltaline_server.layers.hyper_connection import HyperBlocks, HyperHeads
from deltaline_server.layers.mamba2 import Mamba2Family
from deltaline_server.layers.shapes import AttentionShape, GatedDeltaNetShape, Mamba2Shape
from deltaline_server.models.config import MixerKind, ModelConfig, Scope

MixerFamily = AttentionFamily | GatedDeltaNetFamily | Mamba2Family
BlockFamily = MlpBlocks | PlainBlocks | HyperBlocks


def mixer_family(config: ModelConfig, kind: MixerKind) -> MixerFamily:
    """Return the family of a model's mixers of a kind. Raises KeyError where the config has no shape of it."""
    shape, hidden, eps = config.shapes[kind], config.hidden_size, config.rms_norm_eps
    if isinstance(shape, Mamba2Shape):
        return Mamba2Family(shape, hidden, eps)
    if isinstance(shape, AttentionShape):
        return AttentionFamily(shape, hidden, eps)
    assert isinstance(shape, GatedDeltaNetShape)
    return GatedDeltaNetFamily(shape, hidden, eps, config.interleaves_projections)


def block_family(config: ModelConfig) -> BlockFamily:
    """Return the family of the blocks around them."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    blocks: MlpBlocks | PlainBlocks = PlainBlocks(hidden, eps, config.residual_in_fp32)
    if config.has_mlp_blocks:
        blocks = MlpBlocks(hidden, config.intermediate_size, eps)
    return blocks if config.streams is None else HyperBlocks(blocks, config.streams)


def head_family(config: ModelConfig) -> HyperHeads:
    """Return the family of the head of a model with streams."""
    assert config.streams is not None
    return HyperHeads(config.hidden_size, config.rms_norm_eps, config.streams)


def served_modules(config: ModelConfig, kind: MixerKind, scope: Scope) -> tuple[Module, ...]:
    """Return the modules of a served layer with a mixer of a kind, those of one projection in the order of its rows."""
    mixer = mixer_family(config, kind).modules
    return mixer if scope is Scope.MIXER else mixer + block_family(config).modules
