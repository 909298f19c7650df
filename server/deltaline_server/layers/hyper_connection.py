"""Hyper-connections: what a checkpoint holds for them around each branch of a layer and behind the last layer.

The streams take the place of the residual: a branch's input is their weighted sum, its output is added to each, and
they are mixed (deltaline_kernels.mhc has the formula). Names and constants are those of transformers' deepseek_v4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels import Gates, LoraWeights, mhc_head, prepare_gates
from deltaline_server.checkpoints.layer_reader import LayerReader
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.layers.block import Blocks, Layer, Residual
from deltaline_server.layers.streams import StreamConfig

# One for each branch, in their order: around the mixer, whatever it is, and around the MLP; where a layer has one of
# them alone, the first.
CONNECTIONS = ("attn_hc.", "ffn_hc.")
HEAD = "hc_head."
# Gates of outputs are sigmoids times this.
POST_MULTIPLIER = 2.0


@dataclass(frozen=True)
class Connection:
    """A branch (its norm and what it computes; its sum is not used) and the gates that join it to the streams."""

    branch: Residual
    gates: Gates


@dataclass(frozen=True)
class HyperBlock:
    """A decoder layer whose branches are joined to streams. It computes as a part of a stack (stack.py)."""

    connections: tuple[Connection, ...]


@dataclass(frozen=True)
class HyperBlocks:
    """The blocks of a model with streams: those of the same model without, and a connection around each branch."""

    blocks: Blocks
    streams: StreamConfig

    @property
    def names(self) -> tuple[str, ...]:
        """The beginnings of all names of a block beside its mixer."""
        return (*self.blocks.names, *CONNECTIONS)

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linear modules beside the mixer's."""
        return self.blocks.modules

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the other tensors beside the mixer's, as they are stored."""
        return self.blocks.tensors | {
            prefix + name: shape
            for prefix in CONNECTIONS[: self.blocks.num_branches]
            for name, shape in _gate_shapes(self.streams.count, self.blocks.hidden_size).items()
        }

    def block(self, reader: LayerReader, mixer: Layer | None, adapters: Mapping[Packed, LoraWeights]) -> HyperBlock:
        """Load a block around its mixer; None where it has none."""
        branches = self.blocks.block(reader, mixer, adapters).branches
        pairs = zip(branches, CONNECTIONS[: len(branches)], strict=True)
        return HyperBlock(tuple(Connection(branch, self._gates(reader, prefix, branch)) for branch, prefix in pairs))

    def _gates(self, reader: LayerReader, prefix: str, branch: Residual) -> Gates:
        streams = self.streams
        return prepare_gates(
            reader.vector(prefix + "fn"),
            reader.vector(prefix + "scale"),
            reader.vector(prefix + "base"),
            rms_eps=self.blocks.eps,
            pre_eps=streams.eps,
            sinkhorn_eps=streams.eps,
            post_multiplier=POST_MULTIPLIER,
            sinkhorn_repeat=streams.sinkhorn_iters,
            # They are twice as large as the weight, and no other streams meet them.
            has_terms=branch.dtype == torch.bfloat16 and not branch.in_fp32,
        )


class HyperHead:
    """Joins the streams behind the last layer, before the final norm, by gates of its own."""

    def __init__(self, reader: LayerReader, streams: StreamConfig, rms_eps: float) -> None:
        """Load it: weight `[streams, streams * hidden]`, scale `[1]`, base `[streams]`, all fp32."""
        self._weight, self._scale, self._base = (
            reader.vector(HEAD + name) for name in ("hc_fn", "hc_scale", "hc_base")
        )
        self._rms_eps, self._pre_eps = rms_eps, streams.eps

    def join(self, residual: Tensor) -> Tensor:
        """The weighted sum `[T, hidden]` of streams `[T, streams, hidden]`."""
        return mhc_head(residual, self._weight, self._scale, self._base, self._rms_eps, self._pre_eps)


class MeanHead:
    """Joins the streams behind the last layer, before the final norm, by their mean."""

    def join(self, residual: Tensor) -> Tensor:
        """The mean `[T, hidden]` of streams `[T, streams, hidden]`, rounded once."""
        return residual.mean(dim=1)


def head_tensors(streams: StreamConfig, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the head's tensors, as they are stored behind the name of the module that has the layers."""
    if streams.averages:
        return {}
    count = streams.count
    return {HEAD + "hc_fn": (count, count * hidden_size), HEAD + "hc_scale": (1,), HEAD + "hc_base": (count,)}


def _gate_shapes(streams: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a connection: the gates of inputs, of outputs and of the mixture."""
    num_gates = streams * (2 + streams)
    return {"fn": (num_gates, streams * hidden_size), "scale": (3,), "base": (num_gates,)}
