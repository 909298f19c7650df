"""The layers of a span, and what a decoder block has around its mixer: norms, residuals and an MLP.

There are two kinds of blocks: norm, mixer, residual, norm, MLP, residual; and norm, mixer, residual. Layers compute on
packed tokens, and follow the checkpoint's model in its dtypes: norms in fp32 and rounded once, residuals in the dtype
that the config asks for. Everywhere `adapters` are the device's memory of adapters for a layer's projections, none on a
server without adapters, and `tiles` the tokens of a batch that have adapters, None where none has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import MLP, Module, Packed, mlp_modules
from deltaline_server.layers.projection import load_projection

INPUT_NORM, POST_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
NORM = "norm.weight"


class Layer(Protocol):
    """What a span is made of."""

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`.

        state: what the pool keeps for a layer of this kind, a LayerState or a KvState.
        """


class Residual:
    """A residual branch: hidden + inner(norm(hidden)).

    The sum is fp32 if `in_fp32`, else in the dtype of what came; inner computes in `dtype`.
    """

    def __init__(self, inner: Layer, norm: Tensor, eps: float, dtype: torch.dtype, *, in_fp32: bool = False) -> None:
        """norm: `[hidden]` fp32, what a normalised row is multiplied by."""
        self.inner = inner
        self.norm, self.eps, self.dtype, self.in_fp32 = norm, eps, dtype, in_fp32

    @property
    def branches(self) -> tuple[Residual, ...]:
        """Itself, as what a layer of one branch is made of."""
        return (self,)

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        normed = rms_norm(hidden.to(self.dtype), self.norm, self.eps)
        residual = hidden.float() if self.in_fp32 else hidden
        return residual + self.inner.forward(normed, rows, state, tiles)


class Mlp:
    """A SwiGLU MLP. With shared columns its output is one rank's summand."""

    def __init__(self, reader: LayerReader, adapters: Mapping[Packed, LoraWeights]) -> None:
        """Load it. The rows of gate_up are gate | up."""
        self.gate_up = load_projection(reader, Packed.GATE_UP, adapters)
        self.down = load_projection(reader, Packed.DOWN, adapters)

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; it has no state."""
        gate, up = self.gate_up(hidden, tiles).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, tiles)


class Block:
    """A decoder layer of two residual branches: its mixer, then its MLP."""

    def __init__(self, mixer: Residual, mlp: Residual) -> None:
        self.mixer, self.mlp = mixer, mlp

    @property
    def branches(self) -> tuple[Residual, ...]:
        """What it is made of, in their order."""
        return self.mixer, self.mlp

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        return self.mlp.forward(self.mixer.forward(hidden, rows, state, tiles), rows, state, tiles)


@dataclass(frozen=True)
class MlpBlocks:
    """The blocks of a model whose layers have a mixer and an MLP. Its norms multiply by 1 + w."""

    hidden_size: int
    intermediate_size: int
    eps: float

    num_branches = 2
    names = ("input_layernorm.", "post_attention_layernorm.", MLP)
    """The beginnings of all names of a block beside its mixer, whatever its MLP."""

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules beside the mixer's."""
        return mlp_modules(self.hidden_size, self.intermediate_size)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the other tensors beside the mixer's, as they are stored."""
        return {INPUT_NORM: (self.hidden_size,), POST_NORM: (self.hidden_size,)}

    def block(self, reader: LayerReader, mixer: Layer, adapters: Mapping[Packed, LoraWeights]) -> Block:
        """Load a block around its mixer."""
        input_norm, post_norm = (1 + reader.vector(name) for name in (INPUT_NORM, POST_NORM))
        return Block(
            Residual(mixer, input_norm, self.eps, reader.placement.dtype),
            Residual(Mlp(reader, adapters), post_norm, self.eps, reader.placement.dtype),
        )


@dataclass(frozen=True)
class PlainBlocks:
    """The blocks of a model whose layers have a mixer alone. Its norms multiply by w."""

    hidden_size: int
    eps: float
    residual_in_fp32: bool

    num_branches = 1
    names = ("norm.",)
    """The beginnings of all names of a block beside its mixer."""

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules beside the mixer's."""
        return ()

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the other tensors beside the mixer's, as they are stored."""
        return {NORM: (self.hidden_size,)}

    def block(self, reader: LayerReader, mixer: Layer, adapters: Mapping[Packed, LoraWeights]) -> Residual:
        """Load a block around its mixer."""
        return Residual(mixer, reader.vector(NORM), self.eps, reader.placement.dtype, in_fp32=self.residual_in_fp32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of x `[T, D]` in fp32 and scale it by `weight` `[D]` fp32; rounded to x.dtype once."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
