"""The device's memory for adapters: places for them in every projection of the served layers, allocated once.

Which adapter is in which place is for adapter_places.py to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from deltaline_kernels import MAX_RANK, LoraWeights
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import Packed
from deltaline_server.models.lora_layout import AdapterLayout, Slices
from deltaline_server.models.lora_weights import Adapter


class AdapterStore:
    """Places 0 .. num_places - 1, each with room for an adapter of ranks up to max_rank; empty at first.

    An empty place adds nothing. total_bytes: of the device.

    Every place has DoRA's factors, 4 bytes per output beside 2 * max_rank of B in 16 bits: so an adapter with them
    needs no place of its own kind.
    """

    def __init__(self, layout: AdapterLayout, num_places: int, max_rank: int) -> None:
        """Allocate, after the size was computed in Python integers. Raises ModelError as `store_bytes` does."""
        self.total_bytes = store_bytes(layout, num_places, max_rank)
        self.num_places, self.max_rank = num_places, max_rank
        self.device = layout.placement.device
        # Ordinary tensors: they may be written outside of inference mode.
        with torch.inference_mode(False):
            self._layers = {layer: _allocate(layout, layer, num_places, max_rank) for layer in layout.layers}

    def layer(self, layer: int) -> Mapping[Packed, LoraWeights]:
        """The places of a layer's projections."""
        return self._layers[layer]

    def write(self, place: int, adapter: Adapter) -> None:
        """Put an adapter in a place; nothing of what was there is left. Mutates the place, allocates nothing.

        On a GPU the copies are queued on the current stream: until they are over the adapter has to stay.
        Raises: ValueError naming what the places have no room for; then nothing was written.
        """
        for one in adapter.weights:
            weights = self._layers.get(one.layer, {}).get(one.packed)
            if weights is None or weights.sizes != one.sizes or one.a[0].shape[1] != weights.num_inputs:
                raise ValueError(
                    f"adapter: expected projections of this model, got another {one.packed} in {one.layer}"
                )
            if len(one.b) > self.max_rank:
                raise ValueError(f"adapter: expected ranks up to {self.max_rank}, got {len(one.b)}")
        self.clear(place)
        for one in adapter.weights:
            weights = self._layers[one.layer][one.packed]
            assert weights.factors is not None
            for i, a in enumerate(one.a):
                weights.a[place, i, : len(a)].copy_(a, non_blocking=True)
            weights.b[place, : len(one.b)].copy_(one.b, non_blocking=True)
            weights.scales[place].copy_(one.scales, non_blocking=True)
            if one.factors is None:
                weights.factors[place].fill_(1)
            else:
                weights.factors[place].copy_(one.factors, non_blocking=True)
            weights.ranks[place].copy_(one.ranks, non_blocking=True)

    def clear(self, place: int) -> None:
        """Overwrite a place with zeros, on the current stream. Raises IndexError."""
        if not 0 <= place < self.num_places:
            raise IndexError(f"place: expected 0..{self.num_places - 1}, got {place}")
        for projections in self._layers.values():
            for weights in projections.values():
                assert weights.factors is not None
                for tensor in (weights.ranks, weights.scales, weights.a, weights.b, weights.factors):
                    tensor[place].zero_()


def store_bytes(layout: AdapterLayout, num_places: int, max_rank: int) -> int:
    """Return the bytes of an AdapterStore, in Python integers; allocate nothing.

    Raises ModelError: no place, or a rank that the kernels don't take.
    """
    if num_places < 1:
        raise ModelError(f"num_places: expected at least 1, got {num_places}")
    if not 1 <= max_rank <= MAX_RANK:
        raise ModelError(f"max_rank: expected 1..{MAX_RANK}, got {max_rank}")
    projections = (slices for layer in layout.layers for slices in layout.projections(layer).values())
    tensors = (tensor for slices in projections for tensor in _tensors(slices, max_rank, layout.placement.dtype))
    return num_places * sum(math.prod(shape) * dtype.itemsize for dtype, shape in tensors)


def _allocate(layout: AdapterLayout, layer: int, num_places: int, max_rank: int) -> dict[Packed, LoraWeights]:
    """Make the empty places of one layer's projections."""
    dtype, device, projections = layout.placement.dtype, layout.placement.device, {}
    for packed, slices in layout.projections(layer).items():
        a, b, ranks, scales, factors = (
            # Not torch.zeros: by the kernel that `write` fills factors with, which is then loaded before batches run.
            torch.full((num_places, *shape), 0, dtype=kind, device=device)
            for kind, shape in _tensors(slices, max_rank, dtype)
        )
        projections[packed] = LoraWeights(a, b, ranks, scales, slices.sizes, factors)
    return projections


def _tensors(slices: Slices, max_rank: int, dtype: torch.dtype) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Dtype and shape of one place's tensors for a projection: a, b, ranks, scales and factors of LoraWeights."""
    count, outputs = len(slices.sizes), sum(slices.sizes)
    return (
        (dtype, (count, max_rank, slices.inputs)),
        (dtype, (max_rank, outputs)),
        (torch.int32, (count,)),
        (torch.float32, (count,)),
        (torch.float32, (outputs,)),
    )
