"""Captured states of a server over ranks: each rank gathers and scatters the heads that it holds, in the layout of its
share, and rank 0 makes whole states of the shares, and shares of whole states.

A section has its heads first, so that a rank's share of it is one run of bytes. What travels is those bytes, between
hosts' memory; what is told of a state is integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_server.layers.state_pool import StatePool
from deltaline_server.models.model import Model
from deltaline_server.ranks.ways import Ranks
from deltaline_server.snapshots.device.transfer import Commits, StatePlace, StateTransfer
from deltaline_server.snapshots.layout import (
    COMMIT_FIELDS,
    NUM_PROGRESS_FIELDS,
    Bytes,
    Part,
    SpanProgress,
    StateLayout,
    state_bytes,
)

Told = NDArray[np.int32]

_GATHER, _SCATTER = 0, 1
# Every rank has them whole.
_OF_SPANS = frozenset({Part.COMMITS, Part.REPLY})


class ShareTransfer:
    """What a rank does of a gather or a scatter: its share, and where that comes from or goes to."""

    def __init__(self, layout: StateLayout, model: Model, numbers: Sequence[int], pool: StatePool, way: Ranks) -> None:
        """Allocate the staging memory. layout: of whole states. numbers: in the checkpoint, of the pool's layers. way:
        between hosts' memory, for this alone."""
        shares = zip(layout.layers, model.shapes, strict=True)
        self.layout = replace(layout, layers=tuple(replace(layer, shape=shape) for layer, shape in shares))
        self._transfer, self._way, self._device = StateTransfer(self.layout, numbers, pool), way, pool.device

    def follow(self, told: Told) -> None:
        """Do on another rank what rank 0 has told; on the stream and thread on which it would copy."""
        kind, spans, place = _heard(told, self.layout.num_spans)
        share = self.room(spans, place)
        if kind == _GATHER:
            self.gather(spans, place, np.zeros((spans[0].num_commits, COMMIT_FIELDS), dtype=np.int64), share)
            self._way.give(torch.from_numpy(share), 0)
        else:
            self._way.take(torch.from_numpy(share), 0)
            self.scatter(spans, place, share)
            self._way.give(torch.ones(1), 0)

    def room(self, spans: Sequence[SpanProgress], place: StatePlace) -> Bytes:
        """Memory for a share."""
        return np.empty(state_bytes(place.layout(self.layout).sections(spans)), dtype=np.uint8)

    def gather(self, spans: Sequence[SpanProgress], place: StatePlace, commits: Commits, share: Bytes) -> None:
        """Fill a share's memory, and wait until that is done."""
        self._transfer.gather(spans, place, commits, share)
        self._wait()

    def scatter(self, spans: Sequence[SpanProgress], place: StatePlace, share: Bytes) -> None:
        """Put a share into the pool, and wait until that is done."""
        self._transfer.scatter(spans, place, share)
        self._wait()

    def commits(self, spans: Sequence[SpanProgress], memory: Bytes) -> Commits:
        """As StateTransfer's, of a share or a whole state: they are its first bytes."""
        return self._transfer.commits(spans, memory)

    def _wait(self) -> None:
        """Until the device has done what was begun on this thread's stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class SharedTransfer:
    """Gathers and scatters whole states on rank 0, as StateTransfer does where a process has all heads."""

    def __init__(self, layout: StateLayout, own: ShareTransfer, way: Ranks, tell: Callable[[Told], None]) -> None:
        """layout: of whole states. own: rank 0's share. tell: lets every other rank `follow`, behind the batches that
        it was told of before."""
        self._layout, self._own, self._way, self._tell = layout, own, way, tell

    def gather(self, spans: Sequence[SpanProgress], place: StatePlace, commits: Commits, memory: Bytes) -> None:
        """As StateTransfer.gather; and it has ended."""
        share, places = self._own.room(spans, place), self._places(spans, place)
        for section in place.layout(self._layout).sections(spans):
            memory[section.offset + section.num_bytes : section.end] = 0
        self._tell(_told(_GATHER, spans, place))
        try:
            self._own.gather(spans, place, commits, share)
            for whole, part in places[0]:
                memory[whole] = share[part]
        finally:  # or the next one, of another state, would take the shares of this one
            for rank, found in enumerate(places[1:], 1):
                self._way.take(torch.from_numpy(share), rank)
                for whole, part in found:
                    memory[whole] = share[part]

    def scatter(self, spans: Sequence[SpanProgress], place: StatePlace, memory: Bytes) -> None:
        """As StateTransfer.scatter; and it has ended on every rank, whose next batch may read what it wrote."""
        share, places = self._own.room(spans, place), self._places(spans, place)
        self._tell(_told(_SCATTER, spans, place))
        for rank, found in reversed(list(enumerate(places))):
            share[:] = 0
            for whole, part in found:
                share[part] = memory[whole]
            if rank:
                self._way.give(torch.from_numpy(share), rank)
        try:
            self._own.scatter(spans, place, share)
        finally:  # or the next one would take the answers to this one
            done = torch.empty(1)
            for rank in range(1, self._way.world_size):
                self._way.take(done, rank)

    def commits(self, spans: Sequence[SpanProgress], memory: Bytes) -> Commits:
        """As StateTransfer.commits."""
        return self._own.commits(spans, memory)

    def _places(self, spans: Sequence[SpanProgress], place: StatePlace) -> list[list[tuple[slice, slice]]]:
        """Of every rank, where each section of its share lies in a whole state, and in the share; replies, which are
        written elsewhere, are left alone, and rank 0 alone has commits."""
        return [self._places_of(rank, spans, place) for rank in range(self._way.world_size)]

    def _places_of(self, rank: int, spans: Sequence[SpanProgress], place: StatePlace) -> list[tuple[slice, slice]]:
        found = []
        layouts = place.layout(self._layout), place.layout(self._own.layout)
        for whole, part in zip(*(one.sections(spans) for one in layouts), strict=True):
            if whole.part is Part.REPLY or (whole.part is Part.COMMITS and rank):
                continue
            offset, length = whole.offset, whole.num_bytes
            if whole.part not in _OF_SPANS:
                offset, length = whole.share(rank, self._way.world_size)
            assert length == part.num_bytes
            found.append((slice(offset, offset + length), slice(part.offset, part.offset + length)))
        return found


def _told(kind: int, spans: Sequence[SpanProgress], place: StatePlace) -> Told:
    """A gather or scatter as integers: its kind, how many lines, each span's progress, the lines, then the pages."""
    numbers = [
        kind,
        len(place.lines),
        *(value for span in spans for value in span.values),
        *place.lines,
        *place.pages.tolist(),
    ]
    return np.array(numbers, dtype=np.int64).view(np.int32)


def _heard(told: Told, num_spans: int) -> tuple[int, list[SpanProgress], StatePlace]:
    numbers = told.view(np.int64)
    (kind, num_lines), values, rest = numbers[:2].tolist(), numbers[2:], num_spans * NUM_PROGRESS_FIELDS
    spans = [SpanProgress(*row) for row in values[:rest].reshape(num_spans, -1).tolist()]
    lines, pages = values[rest : rest + num_lines], values[rest + num_lines :]
    return kind, spans, StatePlace(tuple(lines.tolist()), pages.astype(np.int32))
