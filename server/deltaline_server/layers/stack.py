"""Stacks: what a span computes, its layers one after the other.

The end of a residual branch and the beginning of the next one, in the same layer or in the next, are one call of the
kernels: the sum and the norm of it, and with streams what joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from deltaline_kernels import AdapterTiles, Rows, mhc_post, mhc_post_pre, mhc_pre
from deltaline_server.layers.block import Block, Layer, Residual
from deltaline_server.layers.hyper_connection import HyperBlock, HyperHead
from deltaline_server.step import SpanShapes


class MixerStack:
    """Mixers one after the other, without what blocks have around them."""

    def __init__(self, mixers: Sequence[Layer]) -> None:
        self._mixers = mixers

    def forward(self, hidden: Tensor, rows: Rows, states: Sequence[Any], tiles: AdapterTiles | None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of the layers' states."""
        for mixer, state in zip(self._mixers, states, strict=True):
            hidden = mixer.forward(hidden, rows, state, tiles)
        return hidden


class BranchStack:
    """Blocks whose branches add to one residual."""

    def __init__(self, blocks: Sequence[Block | Residual]) -> None:
        # Each branch with the place of its layer, and the one behind it.
        branches = [(i, branch) for i, block in enumerate(blocks) for branch in block.branches]
        following = [branch for _, branch in branches[1:]]
        self._branches = [(*pair, after) for pair, after in zip(branches, (*following, None), strict=True)]

    def forward(self, hidden: Tensor, rows: Rows, states: Sequence[Any], tiles: AdapterTiles | None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of the layers' states."""
        residual, entering = hidden, self._branches[0][1].enter(hidden)
        for layer, branch, following in self._branches:
            made = branch.inner.forward(entering, rows, states[layer], tiles)
            residual, entering = branch.join(made, residual, following)
        return residual


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


Stack = MixerStack | BranchStack | HyperStack
"""What a span computes."""


def make_stack(
    layers: Sequence[Layer | Block | Residual | HyperBlock],
    ends: SpanShapes,
    streams: int,
    load_head: Callable[[], HyperHead],
) -> Stack:
    """Make the stack of a span's layers, which are of one kind. streams: 0 where layers pass on `[T, hidden]`."""
    blocks = [layer for layer in layers if isinstance(layer, Block | Residual)]
    if streams:
        head = None if ends.output_streams else load_head()
        return HyperStack([layer for layer in layers if isinstance(layer, HyperBlock)], ends, streams, head)
    if blocks:
        return BranchStack(blocks)
    return MixerStack([layer for layer in layers if not isinstance(layer, Block | Residual | HyperBlock)])
