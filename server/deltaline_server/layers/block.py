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
from deltaline_server.layers.projection import Projection

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

    def __init__(self, gate_up: Tensor, down: Tensor, adapters: Mapping[Packed, LoraWeights]) -> None:
        """gate_up: `[2*I, hidden]`, rows gate | up; down: `[hidden, I]`."""
        self._gate_up = Projection(gate_up, adapters.get(Packed.GATE_UP))
        self._down = Projection(down, adapters.get(Packed.DOWN))

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; it has no state."""
        gate, up = self._gate_up(hidden, tiles).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up, tiles)


class Block:
    """A decoder layer of two residual branches: its mixer, then its MLP."""

    def __init__(self, mixer: Residual, mlp: Residual) -> None:
        self.mixer, self._mlp = mixer, mlp

    @property
    def branches(self) -> tuple[Residual, ...]:
        """What it is made of, in their order."""
        return self.mixer, self._mlp

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`."""
        return self._mlp.forward(self.mixer.forward(hidden, rows, state, tiles), rows, state, tiles)


@dataclass(frozen=True)
class BlockWeights:
    """What a block with an MLP adds to its mixer: norms `[hidden]` fp32 as 1 + w, gate_up `[2*I, hidden]`,
    down `[hidden, I]`."""

    input_norm: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


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

    def weights(self, reader: LayerReader) -> BlockWeights:
        """Load what surrounds the mixer."""
        return BlockWeights(
            input_norm=1 + reader.vector(INPUT_NORM),
            post_norm=1 + reader.vector(POST_NORM),
            gate_up=reader.projection(Packed.GATE_UP),
            down=reader.projection(Packed.DOWN),
        )

    def block(self, reader: LayerReader, mixer: Layer, adapters: Mapping[Packed, LoraWeights]) -> Block:
        """Load a block around its mixer."""
        weights, dtype = self.weights(reader), reader.dtype
        mlp = Mlp(weights.gate_up, weights.down, adapters)
        return Block(
            Residual(mixer, weights.input_norm, self.eps, dtype), Residual(mlp, weights.post_norm, self.eps, dtype)
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
        return Residual(mixer, reader.vector(NORM), self.eps, reader.dtype, in_fp32=self.residual_in_fp32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of x `[T, D]` in fp32 and scale it by `weight` `[D]` fp32; rounded to x.dtype once."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
