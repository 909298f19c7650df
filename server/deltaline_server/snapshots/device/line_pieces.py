"""How lines of the pool become bytes of the canonical layout: pieces that cross at once, and runs that one operation
copies between the pool and staging memory.

Sections of layers that are alike repeat at one distance, in a state as in the pool: such a run is one strided tensor on
either side. Knows where things lie, and copies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from deltaline_server.layers.shapes import RecurrentShape
from deltaline_server.layers.state_pool import StatePool
from deltaline_server.snapshots.layout import Part, Section, SpanProgress, StateLayout, conv_parts

WORDS = {2: torch.int16, 4: torch.int32}
"""Integers by their bytes: bits are moved, never values."""

LINE_PARTS = frozenset(Part) - {Part.COMMITS, Part.REPLY, Part.KEYS, Part.VALUES}
"""What lies in lines: in a state their sections follow each other."""

_DRAFTS = (Part.DRAFT_KEYS, Part.DRAFT_UPDATES, Part.DRAFT_GATES)
# Fields of a progress from which the sections of lines follow.
_KEPT = ("draft_half", "records_0", "records_1", "num_commits", "reply_bytes")
_kept = attrgetter(*_KEPT)
_NUM_PLANS = 64


@dataclass(frozen=True)
class Run:
    """What one operation copies: a part of consecutive layers of a block.

    span: whose line is meant. lines: `[L, layers, ...]`, a view of the pool. staged: `[layers, ...]`, a view of staging
    memory.
    """

    span: int
    lines: Tensor
    staged: Tensor


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` .. `end` of a state, which lie in `staged` on their way. has_gaps: between what the runs write."""

    begin: int
    end: int
    staged: Tensor
    has_gaps: bool
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class LinePlan:
    """How the lines of a state are copied. cleared: `[L, layers, ...]` with the span whose line is meant, views of what
    holds more than a state may."""

    pieces: tuple[Piece, ...]
    cleared: tuple[tuple[int, Tensor], ...]


@dataclass(frozen=True)
class _Place:
    """Where the lines of a layer are: which entry of which block."""

    block: int
    index: int
    span: int
    shape: RecurrentShape


class LinePlans:
    """The plans of one pool and its staging memory. They are kept: the states of a server differ in few ways."""

    def __init__(self, layout: StateLayout, numbers: Sequence[int], pool: StatePool, staged: Tensor) -> None:
        """numbers: of the layers in the checkpoint that the pool's states belong to. staged: uint8, line_staging_bytes
        at least."""
        self._layout, self._staged = layout, staged
        self._blocks = [[_words(tensor) for tensor in block.tensors] for block in pool.line_blocks]
        layers = {layer.number: layer for layer in layout.layers if isinstance(layer.shape, RecurrentShape)}
        self._places: dict[int, _Place] = {}
        for i, block in enumerate(pool.line_blocks):
            for index, layer in enumerate(layers[numbers[place]] for place in block.layers):
                assert isinstance(layer.shape, RecurrentShape)
                self._places[layer.number] = _Place(i, index, layer.span, layer.shape)
        self._plan = lru_cache(_NUM_PLANS)(self._make_plan)

    def find(self, spans: Sequence[SpanProgress], lines: Sequence[int]) -> LinePlan:
        """The plan of a state with this progress. lines: of each span; that they are the same is what counts."""
        return self._plan(tuple(map(_kept, spans)), tuple(map(lines.index, lines)))

    def _make_plan(self, kept: tuple[tuple[int, ...], ...], lines: tuple[int, ...]) -> LinePlan:
        spans = [SpanProgress(**dict(zip(_KEPT, values, strict=True))) for values in kept]
        pieces = _cut(_line_sections(self._layout, spans), len(self._staged))
        with torch.inference_mode(False):  # threads use the views that need not be in the mode of this one
            return LinePlan(tuple(self._piece(piece, lines) for piece in pieces), tuple(self._cleared(lines)))

    def _piece(self, sections: Sequence[Section], lines: tuple[int, ...]) -> Piece:
        begin, end = sections[0].offset, sections[-1].end
        found: dict[object, list[list[Section]]] = {}
        for section in sections:
            place = self._places[section.number]
            runs = found.setdefault((section.part, section.half, section.shape, place.block, lines[place.span]), [[]])
            if not self._continues(runs[-1], section):
                runs.append([])
            runs[-1].append(section)
        has_gaps = sum(section.num_bytes for section in sections) < end - begin
        made = tuple(self._run(run, begin) for runs in found.values() for run in runs)
        return Piece(begin, end, self._staged[: end - begin], has_gaps, made)

    def _continues(self, run: Sequence[Section], section: Section) -> bool:
        """Whether a section is as far behind the last of a run as that behind the one before, in the pool too."""
        if not run:
            return True
        if self._places[section.number].index != self._places[run[-1].number].index + 1:
            return False
        return len(run) == 1 or section.offset - run[-1].offset == run[-1].offset - run[-2].offset

    def _run(self, sections: Sequence[Section], begin: int) -> Run:
        first, last, size = sections[0], sections[-1], sections[0].itemsize
        lines = self._lines(first, len(sections))
        shape = lines.shape[1:]
        distance = (last.offset - first.offset) // max(len(sections) - 1, 1) // size
        strides = (distance, *(math.prod(shape[i:]) for i in range(2, len(shape) + 1)))
        staged = self._staged.view(WORDS[size]).as_strided(shape, strides, (first.offset - begin) // size)
        return Run(self._places[first.number].span, lines, staged)

    def _lines(self, first: Section, count: int) -> Tensor:
        """What this section and those like it, of `count` layers, hold of each line: `[L, layers, *section]`, of one
        gate of a head with a last dimension of 1."""
        place = self._places[first.number]
        tensors = (tensor[place.index : place.index + count] for tensor in self._blocks[place.block])
        conv, recurrent, drafts = (tensor.transpose(0, 1) for tensor in tensors)
        if first.part is Part.RECURRENT:
            return recurrent
        rows = drafts[:, :, first.half] if first.part in _DRAFTS else conv
        heads, num_rows, size = (*first.shape, 1)[:3]
        channel = _first_channel(first.part, place.shape)
        by_head: Tensor = rows[:, :, :num_rows, channel : channel + heads * size].unflatten(-1, (heads, size))
        return by_head.transpose(2, 3)

    def _cleared(self, lines: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
        """The conv lines and drafts of layers whose line is the same."""
        for i, (conv, _, drafts) in enumerate(self._blocks):
            places = [place for place in self._places.values() if place.block == i]
            for _, alike in groupby(places, key=lambda place: lines[place.span]):
                first, *rest = alike
                for tensor in (conv, drafts):
                    yield first.span, tensor[first.index : first.index + 1 + len(rest)].transpose(0, 1)


def line_staging_bytes(layout: StateLayout, limit_bytes: int) -> int:
    """Bytes of staging memory for lines: as many as a state of most bytes has of them, up to a limit, and at least one
    section."""
    most = SpanProgress(records_0=layout.max_draft, records_1=layout.max_draft)
    sections = _line_sections(layout, [most] * layout.num_spans)
    if not sections:
        return 0
    largest = max(section.end - section.offset for section in sections)
    return max(largest, min(limit_bytes, sections[-1].end - sections[0].offset))


def _line_sections(layout: StateLayout, spans: Sequence[SpanProgress]) -> list[Section]:
    return [section for section in layout.sections(spans) if section.part in LINE_PARTS]


def _cut(sections: Sequence[Section], limit_bytes: int) -> Iterator[list[Section]]:
    """Cut into pieces of whole sections, each as large as may be."""
    piece: list[Section] = []
    for section in sections:
        if piece and section.end - piece[0].offset > limit_bytes:
            yield piece
            piece = []
        piece.append(section)
    if piece:
        yield piece


def _first_channel(part: Part, shape: RecurrentShape) -> int:
    """The first channel of a part in a row of its line, or in a record."""
    of_record = (
        (Part.DRAFT_KEYS, shape.num_key_heads, shape.key_dim),
        (Part.DRAFT_UPDATES, shape.num_value_heads, shape.value_dim),
        (Part.DRAFT_GATES, shape.num_value_heads, shape.head_gates),
    )
    first = 0
    for each, heads, size in of_record if part in _DRAFTS else conv_parts(shape):
        if each is part:
            break
        first += heads * size
    return first


def _words(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    return tensor.view(WORDS[tensor.itemsize])
