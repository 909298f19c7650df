"""The layers of a span, and what a decoder block has around its mixer: norms, residuals and an MLP.

A block is one branch or two: norm, mixer, residual, norm, MLP, residual; or norm, mixer or MLP, residual. Layers
compute on packed tokens, and follow the checkpoint's model in its dtypes: norms in fp32 and rounded once, residuals in
the dtype that the config asks for. A branch's sum is made where the next one begins (stack.py). Everywhere `adapters`
are the device's memory of adapters for a layer's projections, none on a server without adapters, and `tiles` the tokens
of a batch that have adapters, None where none has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deltaline_kernels import AdapterTiles, LoraWeights, Rows, add_rms_norm, rms_norm
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import MLP, MlpNames, Module, Packed, mlp_modules
from deltaline_server.layers.expert_shape import ExpertsShape
from deltaline_server.layers.experts import EXPERTS, ExpertNames, Experts, expert_modules, expert_tensors
from deltaline_server.layers.mlp import Mlp
from deltaline_server.ranks.ways import Ranks


class Layer(Protocol):
    """What a span is made of."""

    def forward(self, hidden: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None = None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of `state`.

        state: what the pool keeps for a layer of this kind: a LayerState or a KvState, both of two mixers beside each
        other, nothing where there is none.
        """


class Residual:
    """A residual branch: hidden + scale * inner(norm(hidden)), or hidden + scale * norm(inner(hidden)) if norms_output.

    The sum is fp32 if `in_fp32`, else in the dtype of what came; inner computes in `dtype`.
    """

    def __init__(
        self,
        inner: Layer,
        norm: Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        in_fp32: bool = False,
        scale: float = 1.0,
        norms_output: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """norm: `[hidden]` fp32, what a normalised row is multiplied by. ranks: what sums what branches give where each
        has a summand; None where inner gives the whole."""
        self.inner, self.scale, self.norms_output = inner, scale, norms_output
        self.norm, self.eps, self.dtype, self.in_fp32 = norm, eps, dtype, in_fp32
        self.ranks = ranks

    def enter(self, hidden: Tensor) -> Tensor:
        """Return what inner computes on of hidden `[T, hidden]`, in `dtype`."""
        hidden = hidden.to(self.dtype)
        return hidden if self.norms_output else rms_norm(hidden, self.norm, self.eps)

    def enter_behind(self, made: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return hidden + scale * made, the sum of the branch before this one, and what inner computes on of it."""
        if self.ranks is not None:
            if self.ranks.joins(made):
                return self.ranks.join(made, hidden, self.norm, self.eps, scale)
            made = self.ranks.sum(made)
        if self.norms_output:
            hidden = add_scaled(hidden, made, scale)
            return hidden, hidden.to(self.dtype)
        return add_rms_norm(made, hidden, self.norm, self.eps, scale=scale)

    def compute(self, entering: Tensor, rows: Rows, state: Any, tiles: AdapterTiles | None) -> Tensor:
        """Return what is to be scaled and added, of ranks a summand; mutates the write lines of `state`."""
        made = self.inner.forward(entering, rows, state, tiles)
        return rms_norm(made, self.norm, self.eps) if self.norms_output else made


def add_scaled(hidden: Tensor, made: Tensor, scale: float) -> Tensor:
    """Return hidden + scale * made in hidden's dtype, computed in fp32 and rounded once: the sum of `add_rms_norm`."""
    if hidden.device.type == "cpu":
        # In 16 bits the CPU's sum rounds scale * made before it adds it; a GPU's does not.
        return hidden.float().add(made, alpha=scale).to(hidden.dtype)
    return hidden.add(made, alpha=scale)


@dataclass(frozen=True)
class Block:
    """A decoder layer: its residual branches, the mixer's first. It computes as a part of a stack (stack.py)."""

    branches: tuple[Residual, ...]


@dataclass(frozen=True)
class BlockNames:
    """How a family stores what is around its mixers: names without the prefix and the layer's number.

    norms: what stands before the weight of each norm. norm_offset: what is added to it. norms_outputs: whether they are
    behind what they belong to. mlp: of dense MLPs. experts: of mixtures of them.
    """

    norms: tuple[str, ...]
    norm_offset: int
    mlp: MlpNames = MLP
    experts: ExpertNames = EXPERTS
    norms_outputs: bool = False


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model: a branch for each norm, around the mixer, and then around an MLP or experts.

    intermediate_size: of the MLP. in_fp32: whether sums are kept in fp32. experts: None where there is an MLP, if any.
    has_mlp_bias: whether its projections have biases. scale: of what branches add. mlp_scales, mlp_limit: as Mlp has
    them. has_mixer: whether there is one; has_mlp: whether there is an MLP or a mixture of experts.
    """

    stored: BlockNames
    hidden_size: int
    intermediate_size: int
    eps: float
    in_fp32: bool = False
    experts: ExpertsShape | None = None
    has_mlp_bias: bool = False
    scale: float = 1.0
    mlp_scales: tuple[float, ...] = (1.0, 1.0)
    mlp_limit: float = 0.0
    has_mixer: bool = True
    has_mlp: bool = True

    @property
    def num_branches(self) -> int:
        """1, or 2 with a mixer and an MLP."""
        return self.has_mixer + self.has_mlp

    @property
    def names(self) -> tuple[str, ...]:
        """The beginnings of all names of a block beside its mixer, whatever its MLP."""
        stored = self.stored
        return stored.norms if len(stored.norms) == 1 else (*stored.norms, stored.mlp.name, stored.experts.name)

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules beside the mixer's."""
        if not self.has_mlp:
            return ()
        if self.experts is not None:
            return expert_modules(self.stored.experts, self.hidden_size, self.experts)
        return mlp_modules(self.stored.mlp, self.hidden_size, self.intermediate_size)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the other tensors beside the mixer's, as they are stored."""
        tensors: dict[str, tuple[int, ...]] = {f"{norm}weight": (self.hidden_size,) for norm in self.stored.norms}
        if self.experts is not None:
            tensors |= expert_tensors(self.stored.experts, self.hidden_size, self.experts)
        elif self.has_mlp_bias:
            tensors |= {f"{module.name}.bias": (module.rows,) for module in self.modules}
        return tensors

    def block(self, reader: LayerReader, mixer: Layer | None, adapters: Mapping[Packed, LoraWeights]) -> Block:
        """Load a block around its mixer; None where it has none."""
        place = reader.placement
        inner: list[Layer] = [] if mixer is None else [mixer]
        if self.experts is not None:
            inner.append(Experts(reader, self.stored.experts, self.hidden_size, self.experts))
        elif self.has_mlp:
            activation = self.stored.mlp.activation
            has_bias, scales, limit = self.has_mlp_bias, self.mlp_scales, self.mlp_limit
            inner.append(Mlp(reader, adapters, activation=activation, has_bias=has_bias, scales=scales, limit=limit))
        branches = (
            Residual(
                layer,
                self.stored.norm_offset + reader.vector(f"{norm}weight"),
                self.eps,
                place.dtype,
                in_fp32=self.in_fp32,
                scale=self.scale,
                norms_output=self.stored.norms_outputs,
                ranks=place.ranks if place.leaves_summands else None,
            )
            for layer, norm in zip(inner, self.stored.norms, strict=True)
        )
        return Block(tuple(branches))
