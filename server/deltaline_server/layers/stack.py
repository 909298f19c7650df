"""Stacks: what a span computes, its layers one after the other.

The end of a branch and the beginning of the next one, in the same layer or in the next, are one call of the kernels:
the sum of the residual, or its streams' mixture, and the norm behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from deltaline_kernels import AdapterTiles, Rows, mhc_post, mhc_post_pre, mhc_pre
from deltaline_server.layers.block import Block, Layer, add_scaled
from deltaline_server.layers.hybrid import SharedBlock
from deltaline_server.layers.hyper_connection import HyperBlock, HyperHead, MeanHead
from deltaline_server.step import SpanShapes


class MixerStack:
    """A mixer alone."""

    def __init__(self, mixer: Layer) -> None:
        self.layers = (mixer,)

    def part(self, places: Sequence[int]) -> MixerStack:
        """The stack itself, of which there is no smaller one."""
        return self

    def forward(self, hidden: Tensor, rows: Rows, states: Sequence[Any], tiles: AdapterTiles | None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of the mixer's state, the only one."""
        return self.layers[0].forward(hidden, rows, states[0], tiles)


class BlockStack:
    """Layers whose branches are added to a residual."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.layers = blocks
        # Each branch with the place of its layer.
        self._branches = [(i, branch) for i, block in enumerate(blocks) for branch in block.branches]

    def part(self, places: Sequence[int]) -> BlockStack:
        """What computes the layers at these places alone, one behind the other."""
        return BlockStack([self.layers[i] for i in places])

    def forward(self, hidden: Tensor, rows: Rows, states: Sequence[Any], tiles: AdapterTiles | None) -> Tensor:
        """Compute `[T, hidden]` from `[T, hidden]`; mutates the write lines of the layers' states."""
        (layer, branch), *others = self._branches
        residual = hidden.float() if branch.in_fp32 else hidden
        made = branch.compute(branch.enter(residual), rows, states[layer], tiles)
        for layer, following in others:
            residual, entering = following.enter_behind(made, residual, branch.scale)
            branch = following
            made = branch.compute(entering, rows, states[layer], tiles)
        if branch.ranks is not None:
            made = branch.ranks.sum(made)
        return residual + made if branch.scale == 1.0 else add_scaled(residual, made, branch.scale)


class EmbeddingStack:
    """Layers some of which take beside their input what the first one was given: the embeddings."""

    def __init__(self, layers: Sequence[Block | SharedBlock]) -> None:
        self.layers = layers
        # Each of these layers, and each run of others, with the places of its states.
        self._parts: list[tuple[slice, SharedBlock | BlockStack]] = []
        end = 0
        for is_shared, run in groupby(layers, key=lambda layer: isinstance(layer, SharedBlock)):
            some = list(run)
            begin, end = end, end + len(some)
            if is_shared:
                shared = (layer for layer in some if isinstance(layer, SharedBlock))
                self._parts += [(slice(i, i + 1), layer) for i, layer in enumerate(shared, begin)]
            else:
                self._parts.append((slice(begin, end), BlockStack([one for one in some if isinstance(one, Block)])))

    def part(self, places: Sequence[int]) -> EmbeddingStack:
        """What computes the layers at these places alone, one behind the other."""
        return EmbeddingStack([self.layers[i] for i in places])

    def forward(self, hidden: Tensor, rows: Rows, states: Sequence[Any], tiles: AdapterTiles | None) -> Tensor:
        """Compute `[T, hidden]` from embeddings `[T, hidden]`; mutates the write lines of the layers' states."""
        embeddings = hidden
        for places, part in self._parts:
            if isinstance(part, SharedBlock):
                [state] = states[places]
                hidden = part.join(hidden, embeddings, rows, state, tiles)
            else:
                hidden = part.forward(hidden, rows, states[places], tiles)
        return hidden


class HyperStack:
    """Layers whose branches are joined to streams, and the ends of the model that are the span's."""

    def __init__(
        self, blocks: Sequence[HyperBlock], ends: SpanShapes, streams: int, head: HyperHead | MeanHead | None
    ) -> None:
        """ends: streams of the input or output 0 where they begin or end here. head: None where they do not end."""
        self.layers = blocks
        # Each connection with the place of its layer.
        self._connections = [(i, one) for i, block in enumerate(blocks) for one in block.connections]
        self._ends, self._streams, self._head = ends, streams, head

    def part(self, places: Sequence[int]) -> HyperStack:
        """What computes the layers at these places alone, one behind the other, between the same ends."""
        return HyperStack([self.layers[i] for i in places], self._ends, self._streams, self._head)

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


Stack = MixerStack | BlockStack | EmbeddingStack | HyperStack
"""What a span computes."""


def make_stack(
    layers: Sequence[Layer | Block | HyperBlock | SharedBlock],
    ends: SpanShapes,
    streams: int,
    load_head: Callable[[], HyperHead | MeanHead],
) -> Stack:
    """Make the stack of a span's layers, which are of one kind, and one where they are mixers; but blocks may stand
    beside those that are shared. streams: 0 where layers pass on `[T, hidden]`."""
    blocks = [layer for layer in layers if isinstance(layer, Block | SharedBlock)]
    own = [block for block in blocks if isinstance(block, Block)]
    if blocks:
        return BlockStack(own) if len(own) == len(blocks) else EmbeddingStack(blocks)
    if streams:
        head = None if ends.output_streams else load_head()
        return HyperStack([layer for layer in layers if isinstance(layer, HyperBlock)], ends, streams, head)
    [mixer] = [layer for layer in layers if not isinstance(layer, Block | HyperBlock | SharedBlock)]
    return MixerStack(mixer)
