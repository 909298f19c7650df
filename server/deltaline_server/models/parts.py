"""What a decoder layer is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MAX_LAYERS = 4096
MAX_SIZE = 1 << 20
MAX_HEADS = 4096
MAX_POSITIONS = 1 << 24


class MixerKind(StrEnum):
    """What mixes the tokens of a layer."""

    GATED_DELTA_NET = "gated_delta_net"
    KDA = "kda"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    SHORT_CONV = "short_conv"
    ATTENTION = "attention"
    LATENT_ATTENTION = "latent_attention"
    MAMBA2_AND_ATTENTION = "mamba2_and_attention"
    """Both, on the same input; their outputs are added."""
    MAMBA2_BEHIND_ATTENTION = "mamba2_behind_attention"
    """Mamba2, to whose input a block that several layers share adds what it makes of hidden states and embeddings."""

    @property
    def parts(self) -> tuple[MixerKind, ...]:
        """The mixers that it is made of, each with a state of its own: itself, or both."""
        both = (MixerKind.MAMBA2_AND_ATTENTION, MixerKind.MAMBA2_BEHIND_ATTENTION)
        return (MixerKind.MAMBA2, MixerKind.ATTENTION) if self in both else (self,)


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
    """The parts of a served layer. mixer: None where it has none. mlp: None where it has none, or is not served with
    it."""

    mixer: MixerKind | None
    mlp: MlpKind | None = None

    @property
    def mixers(self) -> tuple[MixerKind, ...]:
        """The mixers that have a state, in the order in which a pool keeps these."""
        return () if self.mixer is None else self.mixer.parts

    def __str__(self) -> str:
        """How the kind of a layer is shown; a dense MLP beside a mixer goes without saying."""
        mlp = "experts" if self.mlp is MlpKind.MIXTURE_OF_EXPERTS else "mlp"
        if self.mixer is None:
            return mlp
        return f"{self.mixer}, experts" if self.mlp is MlpKind.MIXTURE_OF_EXPERTS else str(self.mixer)
