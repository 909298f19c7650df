"""What the checkpoints of a model type have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.shapes import MixerShape
from deltaline_server.models.keys.mlp import ExpertKeys
from deltaline_server.models.parts import LayerConfig, LayerKind, MixerKind


class MixerKeys(Protocol):
    """What configs call the sizes of a kind of mixer."""

    def read(self, config: ConfigReader) -> MixerShape:
        """Read them. Raises ModelError naming the key."""


@dataclass(frozen=True)
class Family:
    """What the checkpoints of a model type have in common.

    layers: reads which parts each layer has. mixers: by kind, how their configs are read; a kind that is not here is
    not served yet. blocks: how what surrounds a mixer is stored, and what its norms multiply by; attention_blocks: of
    attention, None for the same. experts: how the configs of layers with a mixture of them are read, None where they
    are not served yet. text: the key that has the language model's config, "" where it is the config itself;
    may_be_flat: whether it is that, too, where there is none under the key. text_type: the model type that the one
    under it has to be of. beside: the beginnings of the names of modules that belong to no layer. spellings: tensors of
    a layer that may be stored under other names, or in parts, row behind row. adapters_spell: how adapters may name
    modules of a layer that are stored under other names. unread: the beginnings of names that a layer may have and that
    nothing is made of. streams: how many there are where a config says nothing, None for none; averages_streams: as
    StreamConfig has it. mlp_limit: the key of the limit of gates of dense MLPs, None where there is none. activation:
    the key that must say silu; mlp_activation: the one that must say what the blocks' MLP computes, None where it is
    the same. eps, default_eps: the key of the norms' epsilon, and what it is where a config does not say, None where it
    must. hidden: the key of the hidden size. inner: the key of the size of dense MLPs, None where there are none;
    default_inner: what it is where a config does not say, None where it must. mlp_bias: the key of whether they have
    biases, None where they have none. residual_multiplier: the key of what multiplies what branches add, None where
    nothing does. mlp_scales: the key of what gates and outputs of dense MLPs are multiplied by, None where nothing.
    sums_in_fp32: whether residual_in_fp32 is asked. adjusts_inner: what makes the size of dense MLPs of the config,
    None where that says it.
    """

    layers: Callable[[ConfigReader], tuple[LayerConfig, ...]]
    mixers: Mapping[MixerKind, MixerKeys]
    blocks: BlockNames
    experts: ExpertKeys | None = None
    text: str = ""
    text_type: str = ""
    may_be_flat: bool = False
    beside: tuple[str, ...] = ()
    activation: str | None = "hidden_act"
    mlp_activation: str | None = None
    eps: str = "rms_norm_eps"
    default_eps: float | None = None
    hidden: str = "hidden_size"
    inner: str | None = "intermediate_size"
    default_inner: int | None = None
    residual_multiplier: str | None = None
    mlp_scales: str | None = None
    mlp_bias: str | None = None
    sums_in_fp32: bool = False
    adjusts_inner: Callable[[ConfigReader], int] | None = None
    shares_blocks: bool = False
    attention_blocks: BlockNames | None = None
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    adapters_spell: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    streams: int | None = None
    averages_streams: bool = False
    mlp_limit: str | None = None

    def blocks_of(self, kind: LayerKind) -> BlockNames:
        """How what surrounds mixers of a kind of layers is stored."""
        return self.attention_blocks or self.blocks if kind.mixer is MixerKind.ATTENTION else self.blocks

    @property
    def takes_streams(self) -> bool:
        """Whether residual streams may stand in place of the residual: branches are norm, mixer or MLP, sum."""
        return (
            self.residual_multiplier is None
            and not self.shares_blocks
            and not (self.attention_blocks or self.blocks).norms_outputs
        )
