"""Places for adapters on all ranks: rank 0 has every rank's share of an adapter in host memory, each rank its places.

What travels is the bytes of a share, as they lie in memory; where they belong follows from a few integers, and is the
same on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from deltaline_server.checkpoints.modules import Packed
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.lora_places import AdapterStore
from deltaline_server.models.lora_weights import Adapter, AdapterShape
from deltaline_server.ranks.ways import Ranks

_PACKED = tuple(Packed)
# Of a message: what is to be done, a place, and how many integers follow.
_HEADER = 3


class _Order(IntEnum):
    END = 0
    WRITE = 1
    CLEAR = 2


class Store(Protocol):
    """What the places of adapters are written by. Raises as AdapterStore does."""

    device: torch.device

    def write(self, place: int, adapter: Adapter) -> None:
        """Put an adapter in a place."""

    def clear(self, place: int) -> None:
        """Overwrite a place with zeros."""


class SharedStore:
    """The places of all ranks, as rank 0 writes them. A call returns when the others have done it."""

    def __init__(self, own: AdapterStore, way: Ranks) -> None:
        """way: to the others, who `follow_adapters`; used for nothing else."""
        self._own, self._way, self.device = own, way, own.device

    def write(self, place: int, adapter: Adapter) -> None:
        """Put an adapter in a place of every rank. Raises ValueError as AdapterStore.write; RuntimeError: a rank is
        gone."""
        told = _told(adapter)
        self._tell(_Order.WRITE, place, told)
        for rank, share in enumerate(adapter.shares, 1):
            self._way.give(share.memory, rank)
        try:
            self._own.write(place, adapter)
        finally:  # or the next order would take the answers to this one
            self._wait()

    def clear(self, place: int) -> None:
        """Overwrite a place of every rank with zeros."""
        self._tell(_Order.CLEAR, place, [])
        try:
            self._own.clear(place)
        finally:
            self._wait()

    def close(self) -> None:
        """Let the others' threads end."""
        with contextlib.suppress(RuntimeError):  # of a rank that is gone
            self._tell(_Order.END, 0, [])

    def _tell(self, order: _Order, place: int, told: list[int]) -> None:
        self._way.broadcast(torch.tensor([order, place, len(told)]))
        if told:
            self._way.broadcast(torch.tensor(told))

    def _wait(self) -> None:
        done = torch.empty(1, dtype=torch.int64)
        for rank in range(1, self._way.world_size):
            self._way.take(done, rank)


def follow_adapters(store: AdapterStore, layout: AdapterLayout, way: Ranks) -> None:
    """Write a rank's places as rank 0 tells, until it ends; the thread sleeps while there is nothing.

    Raises RuntimeError when rank 0 is gone.
    """
    header, done = torch.empty(_HEADER, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    with torch.inference_mode(), _beside(store.device) as stream:
        while True:
            way.broadcast(header)
            order, place, count = header.tolist()
            if order == _Order.END:
                return
            told = torch.empty(count, dtype=torch.int64)
            if count:
                way.broadcast(told)
            if order == _Order.WRITE:
                share = _share(layout, told.tolist())
                way.take(share.memory, 0)
                store.write(place, share)
            else:
                store.clear(place)
            if stream is not None:
                stream.synchronize()
            way.give(done, 0)


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """A stream beside that of batches, where a device has any."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # on which the places were allocated and zeroed
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream


def _told(adapter: Adapter) -> list[int]:
    """Which projections an adapter changes, with which ranks, as integers."""
    told = [adapter.rank]
    for one in adapter.weights:
        told += [one.layer, _PACKED.index(one.packed), one.factors is not None, *one.ranks.tolist()]
    return told


def _share(layout: AdapterLayout, told: list[int]) -> Adapter:
    """An adapter with room for a rank's share."""
    rank, *rest = told
    shapes: dict[tuple[int, Packed], AdapterShape] = {}
    while rest:
        layer, number, has_factors = rest[:3]
        packed = _PACKED[number]
        slices = layout.projections(layer)[packed]
        ranks, rest = tuple(rest[3 : 3 + len(slices.sizes)]), rest[3 + len(slices.sizes) :]
        dtype = layout.placement.dtype
        shapes[layer, packed] = AdapterShape(slices.inputs, slices.sizes, ranks, bool(has_factors), dtype)
    memory = torch.empty(sum(shape.num_bytes for shape in shapes.values()), dtype=torch.uint8)
    parts: tuple[Tensor, ...] = memory.split([shape.num_bytes for shape in shapes.values()])
    weights = (shape.lay_out(*place, part) for (place, shape), part in zip(shapes.items(), parts, strict=True))
    return Adapter(b"", rank, tuple(weights), 0, memory)
