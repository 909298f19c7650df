"""Layers that have two mixers, Mamba2 and attention: beside each other, as in Falcon-H1, or one behind the other in a
layer that begins with a block which several layers share, as in Zamba2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, rms_norm
from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import (
    MlpNames,
    Module,
    Packed,
    mlp_modules,
    without_adapters,
)
from deltaline_server.checkpoints.shared_blocks import BLOCK
from deltaline_server.layers.block import Layer
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.mixers.attention import Attention, AttentionFamily
from deltaline_server.layers.mixers.mamba2 import Mamba2, Mamba2Family
from deltaline_server.layers.mlp import Mlp
from deltaline_server.layers.projection import load_projection
from deltaline_server.layers.state_pool import LayerState

# Before the names of the attention that a shared block has, and of the mixer that the layer itself has.
ATTENTION, MAMBA2 = f"{BLOCK}self_attn.", "mamba_decoder.mamba."
_NORMS = (f"{BLOCK}input_layernorm.weight", f"{BLOCK}pre_ff_layernorm.weight", "mamba_decoder.input_layernorm.weight")
_MLP = MlpNames(f"{BLOCK}feed_forward.", ("gate_up_proj",), activation=Activation.GELU)


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


class SharedBlock:
    """A layer with a shared block: that, without residuals, makes something of hidden states and embeddings beside each
    other, which is added to the input of the layer's Mamba2 branch.

        h + mamba2(norm(h + linear(mlp(norm(attention(norm(h | embeddings)))))))
    """

    def __init__(self, family: SharedBlockFamily, reader: LayerReader, mixer: Parallel) -> None:
        """Load it around its mixers. Of the shared part nothing takes adapters."""
        self._mamba2, self._attention = mixer.mamba2, mixer.attention
        self._norms = [reader.vector(name) for name in _NORMS]
        self._mlp = Mlp(reader, {}, activation=_MLP.activation, has_bias=family.has_mlp_bias)
        self._linear = load_projection(reader, Packed.LINEAR, {})
        self._eps, self._dtype = family.eps, reader.placement.dtype

    def join(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        rows: Rows,
        state: tuple[LayerState, KvState],
        tiles: AdapterTiles | None,
    ) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]` and the embeddings `[T, hidden]`; mutates the states' write
        lines."""
        lines, pages = state
        first, second, own = self._norms
        made = rms_norm(torch.cat((hidden, embeddings), dim=-1), first, self._eps)
        made = self._attention.forward(made, rows, pages)
        made = self._linear(self._mlp.forward(rms_norm(made, second, self._eps), rows, None))
        return hidden + self._mamba2.forward(rms_norm(hidden + made, own, self._eps), rows, lines, tiles)


@dataclass(frozen=True)
class SharedBlockFamily:
    """The layers of a model that have a shared block. intermediate_size, has_mlp_bias: of its MLP."""

    hidden_size: int
    intermediate_size: int
    eps: float
    has_mlp_bias: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The beginnings of all names of a layer beside its mixer."""
        return BLOCK, "linear.", "mamba_decoder.input_layernorm."

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules beside the mixers'."""
        hidden = self.hidden_size
        linear = Module("linear", Packed.LINEAR, hidden, hidden, (hidden,), is_whole=True, takes_adapters=False)
        return *without_adapters(mlp_modules(_MLP, hidden, self.intermediate_size)), linear

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the other tensors beside the mixers', as they are stored."""
        sizes = (2 * self.hidden_size, self.hidden_size, self.hidden_size)
        tensors: dict[str, tuple[int, ...]] = {name: (size,) for name, size in zip(_NORMS, sizes, strict=True)}
        if self.has_mlp_bias:
            tensors |= {f"{module.name}.bias": (module.rows,) for module in self.modules if module.name != "linear"}
        return tensors

    def block(self, reader: LayerReader, mixer: Layer | None, adapters: Mapping[Packed, LoraWeights]) -> SharedBlock:
        """Load a layer around its mixers."""
        assert isinstance(mixer, Parallel)
        return SharedBlock(self, reader, mixer)
