"""What the layers of a model are made of: the families of its mixers and of the blocks around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from deltaline_kernels import LoraWeights
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.attention import AttentionFamily
from deltaline_server.layers.block import Layer, MlpBlocks, PlainBlocks
from deltaline_server.layers.gated_delta_net import GatedDeltaNetFamily
from deltaline_server.layers.hyper_connection import HyperBlock, HyperBlocks, HyperHeads
from deltaline_server.layers.mamba2 import Mamba2Family
from deltaline_server.layers.shapes import AttentionShape, GatedDeltaNetShape, Mamba2Shape
from deltaline_server.models.config import MixerKind, ModelConfig, Scope


class MixerFamily(Protocol):
    """The mixers of one kind of a model."""

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of a mixer, those of one projection in the order of its rows."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a mixer's other tensors as they are stored, without what stands before the mixer's name."""

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> Layer:
        """Load a mixer with these adapters' slots."""


class BlockFamily(Protocol):
    """The blocks around a model's mixers."""

    @property
    def names(self) -> tuple[str, ...]:
        """The beginnings of all names of a block beside its mixer."""

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules beside the mixer's, those of one projection in the order of its rows."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the other tensors beside the mixer's, as they are stored."""

    def block(self, reader: LayerReader, mixer: Layer, adapters: Mapping[Packed, LoraWeights]) -> Layer | HyperBlock:
        """Load a block around its mixer, with these adapters' slots."""


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
