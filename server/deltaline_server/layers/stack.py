"""Stacks: what a span computes, its layers one after the other.

Without streams a layer adds to what it is given. With streams the end of a branch and the beginning of the next one,
in the same layer or in the next, are one call of the kernels, norm included, whose launches overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from deltaline_kernels import AdapterTiles, Rows, mhc_post, mhc_post_pre, mhc_pre
from deltaline_server.layers.block import Layer
from deltaline_server.layers.hybrid import SharedBlock
from deltaline_server.layers.hyper_connection import HyperBlock, HyperHead
from deltaline_server.step import SpanShapes


class PlainStack:
    """Layers one after the other."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def forward(self, hidden: Tensor, rows: Rows, states: Sequence[Any], tiles: AdapterTiles | None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of the layers' states."""
        for layer, state in zip(self._layers, states, strict=True):
            hidden = layer.forward(hidden, rows, state, tiles)
        return hidden


class EmbeddingStack:
    """Layers some of which take beside their input what the first one was given: the embeddings."""

    def __init__(self, layers: Sequence[Layer | SharedBlock]) -> None:
        self._layers = layers

    def forward(self, hidden: Tensor, rows: Rows, states: Sequence[Any], tiles: AdapterTiles | None) -> Tensor:
        """Compute `[T, hidden]` from embeddings `[T, hidden]`; mutates the write lines of the layers' states."""
        embeddings = hidden
        for layer, state in zip(self._layers, states, strict=True):
            if isinstance(layer, SharedBlock):
                hidden = layer.join(hidden, embeddings, rows, state, tiles)
            else:
                hidden = layer.forward(hidden, rows, state, tiles)
        return hidden


class HyperStack:
    """Layers whose branches are joined to streams, and the ends of the model that are the span's."""

    def __init__(self, blocks: Sequence[HyperBlock], ends: SpanShapes, streams: int, head: HyperHead | None) -> None:
        """ends: streams of the input or output 0 where they begin or end here. head: None where they do not end."""
        # Each connection with the place of its layer.
        self._connections = [(i, one) for i, block in enumerate(blocks) for one in block.connections]
        self._ends, self._streams, self._head = ends, streams, head

    def forward(self, hidden: Tensor, rows: Rows, states: Sequence[Any], tiles: AdapterTiles | None) -> Tensor:
        """Compute `[T, output width]` from `[T, input width]`; mutates the write lines of the layers' states."""
        first = self._connections[0][1]
        if self._ends.input_streams:
            residual = hidden.view(len(hidden), *self._ends.input_shape)
        else:
            residual = hidden[:, None].repeat(1, self._streams, 1)
        if first.branch.in_fp32:
            residual = residual.float()
        entering, post, comb = mhc_pre(residual, first.gates, norm_weight=first.branch.norm, norm_eps=first.branch.eps)
        for number, (layer, connection) in enumerate(self._connections, 1):
            branch = connection.branch
            made = branch.inner.forward(entering.to(branch.dtype), rows, states[layer], tiles).to(residual.dtype)
            if number == len(self._connections):
                residual = mhc_post(made, residual, post, comb)
                break
            following = self._connections[number][1]
            residual, entering, post, comb = mhc_post_pre(
                made,
                residual,
                post,
                comb,
                following.gates,
                norm_weight=following.branch.norm,
                norm_eps=following.branch.eps,
            )
        return residual.flatten(1) if self._head is None else self._head.join(residual)


Stack = PlainStack | EmbeddingStack | HyperStack
"""What a span computes."""


def make_stack(
    layers: Sequence[Layer | HyperBlock | SharedBlock],
    ends: SpanShapes,
    streams: int,
    load_head: Callable[[], HyperHead],
) -> Stack:
    """Make the stack of a span's layers. streams: 0 where layers pass on `[T, hidden]`."""
    if any(isinstance(layer, SharedBlock) for layer in layers):
        return EmbeddingStack([layer for layer in layers if not isinstance(layer, HyperBlock)])
    if not streams:
        return PlainStack([layer for layer in layers if not isinstance(layer, HyperBlock | SharedBlock)])
    head = None if ends.output_streams else load_head()
    return HyperStack([layer for layer in layers if isinstance(layer, HyperBlock)], ends, streams, head)
