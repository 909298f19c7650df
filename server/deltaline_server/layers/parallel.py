"""Mixers beside each other in one layer: what a checkpoint holds for them, and their computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.attention import Attention, AttentionFamily
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.mamba2 import Mamba2, Mamba2Family
from deltaline_server.layers.state_pool import LayerState


class Parallel:
    """A Mamba2 and an attention mixer that have the same input, and whose outputs are added."""

    def __init__(self, mamba2: Mamba2, attention: Attention) -> None:
        self.mamba2, self.attention = mamba2, attention

    def forward(
        self, hidden: Tensor, rows: Rows, state: tuple[LayerState, KvState], tiles: AdapterTiles | None = None
    ) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of both states."""
        lines, pages = state
        made = self.mamba2.forward(hidden, rows, lines, tiles)
        return made.add_(self.attention.forward(hidden, rows, pages, tiles))


@dataclass(frozen=True)
class ParallelFamily:
    """Such mixers of a model. Their projections have places of their own, as each mixer's have names of its own."""

    mamba2: Mamba2Family
    attention: AttentionFamily

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules of both."""
        return self.mamba2.modules + self.attention.modules

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the other tensors of both, as they are stored."""
        return self.mamba2.tensors | self.attention.tensors

    def mixer(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> Parallel:
        """Load both with the device's memory of these adapters."""
        return Parallel(self.mamba2.mixer(reader, adapters), self.attention.mixer(reader, adapters))
