"""What a decoder layer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_LAYERS = 4096
MAX_SIZE = 1 << 20


class MixerKind(StrEnum):
    """What mixes the tokens of a layer."""

    GATED_DELTA_NET = "gated_delta_net"
    MAMBA2 = "mamba2"
    ATTENTION = "attention"


class MlpKind(StrEnum):
    """What computes on each token of a layer by itself."""

    DENSE = "dense"
    MIXTURE_OF_EXPERTS = "mixture_of_experts"


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: its number in the checkpoint and its parts; None where it has no such part."""

    index: int
    mixer: MixerKind | None
    mlp: MlpKind | None
