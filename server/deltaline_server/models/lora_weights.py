"""An adapter as it is served: low-rank factors for each projection of the served layers, in host memory.

Laid out as the places on the device are (lora_places.py), so that every tensor is copied there as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_server.checkpoints.modules import Packed

# Tensors begin at multiples of it, so that a copy of any of them is aligned.
ALIGNMENT = 64


@dataclass(frozen=True)
class AdapterWeights:
    """What an adapter adds to a served projection W `[out, in]`: y[n] += scale * (x A^T B)[n], slice by slice of n.

    With `factors` (DoRA) it is y[n] = factor[n] * (y[n] + ...) instead. A slice is a module of the projection; of a
    rank's share it has that rank's columns and rows.

    layer: as in the checkpoint. a: for each slice `[its rank, in]`. b `[R, out]`, R the largest of the ranks: the
    transpose of what files hold, 0 where a slice's own rank ends. Both have the model's dtype.
    ranks `[slices]` int32, 0 where the adapter leaves the slice alone; scales `[slices]` fp32; factors `[out]` fp32, 1
    where a slice has none, or None where no slice has any.
    """

    layer: int
    packed: Packed
    sizes: tuple[int, ...]
    a: tuple[Tensor, ...]
    b: Tensor
    ranks: Tensor
    scales: Tensor
    factors: Tensor | None


@dataclass(frozen=True)
class AdapterShape:
    """The sizes of AdapterWeights: inputs, and for each slice outputs and rank."""

    inputs: int
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    has_factors: bool
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, with the gaps behind them."""
        return sum(_aligned_bytes(dtype, shape) for dtype, shape in self._tensors())

    def lay_out(self, layer: int, packed: Packed, memory: Tensor) -> AdapterWeights:
        """Return the weights in memory `[num_bytes]` uint8; ranks are written, factors are 1 and all else is 0."""
        memory.zero_()
        views, begin = list[Tensor](), 0
        for dtype, shape in self._tensors():
            end = begin + math.prod(shape) * dtype.itemsize
            views.append(memory[begin:end].view(dtype).view(shape))
            begin += _aligned_bytes(dtype, shape)
        factors = views.pop().fill_(1) if self.has_factors else None
        *a, b, ranks, scales = views
        ranks.copy_(torch.tensor(self.ranks))
        return AdapterWeights(layer, packed, self.sizes, tuple(a), b, ranks, scales, factors)

    def _tensors(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor, in their order in memory."""
        count, outputs = len(self.sizes), sum(self.sizes)
        tensors: list[tuple[torch.dtype, tuple[int, ...]]] = [(self.dtype, (rank, self.inputs)) for rank in self.ranks]
        tensors += [(self.dtype, (max(self.ranks), outputs)), (torch.int32, (count,)), (torch.float32, (count,))]
        return [*tensors, (torch.float32, (outputs,))] if self.has_factors else tensors


def _aligned_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Adapter:
    """An adapter. Immutable; all its tensors are parts of `memory` (uint8), from multiples of ALIGNMENT bytes.

    content_hash: SHA-256 over what it does to the whole model: equal on every server, whatever it serves, for equal
    factors and scales (files.py). rank: its largest. weights: by layer, and by place in the layer.
    num_elsewhere: modules that it changes and that are not served here.
    """

    content_hash: bytes
    rank: int
    weights: tuple[AdapterWeights, ...]
    num_elsewhere: int
    memory: Tensor
    shares: tuple[Adapter, ...] = ()
    """On rank 0, the shares of the ranks after it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self.memory.numel() + sum(share.num_bytes for share in self.shares)
