"""What a decoder layer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

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


class LayerKind(NamedTuple):
    """The parts of a served layer. mlp: None where it has none, or is not served with it."""

    mixer: MixerKind
    mlp: MlpKind | None = None

    def __str__(self) -> str:
        """How the kind of a layer is shown; a dense MLP goes without saying."""
        return f"{self.mixer}, experts" if self.mlp is MlpKind.MIXTURE_OF_EXPERTS else str(self.mixer)
