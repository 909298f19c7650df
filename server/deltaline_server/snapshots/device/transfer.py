"""Captured states between the pool and host memory: gathered into the canonical layout, and scattered from it.

All goes by way of staging memory beside the pool, so that what crosses is few large pieces, and each is put together by
few operations. Bits are moved, never values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaline_server.layers.kv_cache import KvPlan, kept_values
from deltaline_server.layers.shapes import MixerShape, PagedShape
from deltaline_server.layers.state_pool import StatePool
from deltaline_server.snapshots.device.line_pieces import LINE_PARTS, WORDS, LinePlans, line_staging_bytes
from deltaline_server.snapshots.layout import Bytes, Part, Section, SpanProgress, StateLayout, token_parts
from deltaline_server.tables.lines import NULL_LINE

# Bytes that cross at once: enough for the link's full speed.
PIECE_BYTES = 32 << 20

Commits = NDArray[np.int64]


@dataclass(frozen=True)
class StatePlace:
    """Where a state lies in the pool: the line of each span, NULL_LINE where none was begun, and its pages in order,
    without those that went ahead. No lines: it is keys and values alone, which go ahead."""

    lines: tuple[int, ...]
    pages: NDArray[np.int32]

    def layout(self, layout: StateLayout) -> StateLayout:
        """What follows for the state that lies there, of the layout of whole ones."""
        return layout if self.lines else layout.pages


class StateTransfer:
    """Gathers and scatters states of one pool, one at a time: on a stream of the caller's where the device has some.

    What it begins has ended once the device is done with that stream; until then nobody may write what is read.
    """

    def __init__(self, layout: StateLayout, numbers: Sequence[int], pool: StatePool) -> None:
        """Allocate the staging memory. numbers: of the layers in the checkpoint that the pool's states belong to."""
        self._layout = layout
        shapes = {layer.number: layer.shape for layer in layout.layers if isinstance(layer.shape, PagedShape)}
        paged = list(dict.fromkeys(number for number in numbers if number in shapes))
        self._blocks = [
            (block.view(WORDS[block.itemsize]), _entries(block, shapes, paged)) for block in pool.page_blocks
        ]
        staged_bytes, page_bytes, max_pages = _memory(layout, pool.kv)
        with torch.inference_mode(False):  # a thread writes to it that need not be in that mode
            self._staged, self._beside = (
                torch.zeros(size, dtype=torch.uint8, device=pool.device) for size in (staged_bytes, page_bytes)
            )
            self._pages = torch.zeros(max_pages, dtype=torch.int64, device=pool.device)
        self._plans = LinePlans(layout, numbers, pool, self._staged)

    def gather(self, spans: Sequence[SpanProgress], place: StatePlace, commits: Commits, memory: Bytes) -> None:
        """Begin to fill a state's memory uint8 [state_bytes], every byte of it, from the pool.

        commits: int64 [n, 3], those that are fixed, kept with span 0.
        """
        host = torch.from_numpy(memory)
        for piece in self._plans.find(spans, place.lines).pieces if place.lines else ():
            if piece.has_gaps:
                piece.staged.zero_()
            for run in piece.runs:
                run.staged.copy_(run.lines[place.lines[run.span]])
            host[piece.begin : piece.end].copy_(piece.staged, non_blocking=True)
        found = place.layout(self._layout).sections(spans)
        sections = [section for section in found if section.part not in LINE_PARTS]
        for section in sections:
            if section.part is Part.COMMITS:
                section.view(memory).view(np.int64)[...] = commits
        self._gather_tokens(sections, place.pages, memory)

    def scatter(self, spans: Sequence[SpanProgress], place: StatePlace, memory: Bytes) -> None:
        """Begin to put a state from its memory into the pool: into lines that nobody reads, of which what the state
        does not hold becomes zero, and pages, as many as its tokens need."""
        host = torch.from_numpy(memory)
        if place.lines:
            self._scatter_lines(spans, place, host)
        self._scatter_tokens(place.layout(self._layout).sections(spans), place.pages, host)

    def _scatter_lines(self, spans: Sequence[SpanProgress], place: StatePlace, host: Tensor) -> None:
        plan = self._plans.find(spans, place.lines)
        for span, lines in plan.cleared:
            if place.lines[span] != NULL_LINE:
                lines[place.lines[span]].zero_()
        for piece in plan.pieces:
            piece.staged.copy_(host[piece.begin : piece.end], non_blocking=True)
            for run in piece.runs:
                if place.lines[run.span] != NULL_LINE:
                    run.lines[place.lines[run.span]].copy_(run.staged)

    def commits(self, spans: Sequence[SpanProgress], memory: Bytes) -> Commits:
        """The fixed commits of a state in memory, int64 [n, 3]."""
        for section in self._layout.sections(spans):
            if section.part is Part.COMMITS:
                found: Commits = section.view(memory).view(np.int64).copy()
                return found
        return np.zeros((0, 3), dtype=np.int64)

    def _gather_tokens(self, sections: Sequence[Section], pages: NDArray[np.int32], memory: Bytes) -> None:
        for section in sections:
            memory[section.offset + section.num_bytes : section.end] = 0
        for block, taken, ordered, crossings, index in self._token_pieces(sections, pages, torch.from_numpy(memory)):
            torch.index_select(block, 1, index, out=taken)
            tokens = ordered.shape[2]
            ordered.copy_(taken.flatten(1, 2)[:, :tokens].transpose(1, 2))
            for target, values in crossings:
                target.copy_(values, non_blocking=True)

    def _scatter_tokens(self, sections: Sequence[Section], pages: NDArray[np.int32], host: Tensor) -> None:
        for block, taken, ordered, crossings, index in self._token_pieces(sections, pages, host):
            for source, values in crossings:
                values.copy_(source, non_blocking=True)
            by_token, tokens = taken.flatten(1, 2), ordered.shape[2]
            by_token[:, tokens:].zero_()
            by_token[:, :tokens].copy_(ordered.transpose(1, 2))
            block.index_copy_(1, index, taken)

    def _token_pieces(
        self, sections: Sequence[Section], pages: NDArray[np.int32], host: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]], Tensor]]:
        """Keys and values, as many layers at once as staging memory has room for, else as many heads of one.

        Yields part of a block `[n, all pages, page_size, H, D]`, room for its pages `[n, pages, page_size, H, D]`, room
        for the tokens `[n, H, tokens, D]`, places in host memory beside what of that room crosses there, and the pages,
        int64.
        """
        found: dict[tuple[int, Part], Section] = {
            (one.number, one.part): one for one in sections if one.part in (Part.KEYS, Part.VALUES)
        }
        if not found:
            return
        index = self._pages[: len(pages)]
        index.copy_(torch.from_numpy(pages.astype(np.int64)))
        for block, entries in self._blocks:
            page_size, num_heads, size = block.shape[2:]
            head_bytes = len(pages) * page_size * size * block.itemsize
            num_heads_at_once = min(num_heads, len(self._beside) // head_bytes)
            count = max(1, len(self._beside) // (head_bytes * num_heads))
            for i, tokens, alike in _runs(entries, found, count):
                for head in range(0, num_heads, num_heads_at_once):
                    part = block[i : i + len(alike), :, :, head : head + num_heads_at_once]
                    n, heads = part.shape[0], part.shape[3]
                    taken = _shaped(self._beside, block.dtype, (n, len(pages), page_size, heads, size))
                    ordered = _shaped(self._staged, block.dtype, (n, heads, tokens, size))
                    yield part, taken, ordered, _crossings(host, alike, ordered, head), index


def _runs(
    entries: Sequence[tuple[int, Part]], found: Mapping[tuple[int, Part], Section], count: int
) -> Iterator[tuple[int, int, list[Section]]]:
    """Sections of as many tokens that follow each other in a block, `count` at most: where they begin, their tokens,
    and they. What has no tokens has no section."""
    sections = [found.get(entry) for entry in entries]
    first = 0
    for tokens, run in groupby(sections, key=lambda section: 0 if section is None else section.shape[1]):
        alike = list(run)
        for at in range(0, len(alike), count):
            some = [section for section in alike[at : at + count] if section is not None]
            if some:
                yield first + at, tokens, some
        first += len(alike)


def _crossings(host: Tensor, sections: Sequence[Section], ordered: Tensor, head: int) -> list[tuple[Tensor, Tensor]]:
    """Places in host memory of some heads of sections, from `head` on, beside them, `[n, H, tokens, D]`: all at once
    where sections follow each other without a gap."""
    first, heads = sections[0], ordered.shape[1]
    if heads == first.shape[0] and all(one.offset + one.num_bytes == other.offset for one, other in pairwise(sections)):
        return [(_shaped(host[first.offset :], ordered.dtype, ordered.shape), ordered)]
    places = (_viewed(host, section)[head : head + heads] for section in sections)
    return list(zip(places, ordered, strict=True))


def staging_bytes(layout: StateLayout, kv: KvPlan | None) -> int:
    """Bytes of a transfer's memory on the device."""
    staged_bytes, page_bytes, max_pages = _memory(layout, kv)
    return staged_bytes + page_bytes + max_pages * torch.int64.itemsize


def _memory(layout: StateLayout, kv: KvPlan | None) -> tuple[int, int, int]:
    """Bytes of staging memory and of that beside it where pages are read and written, and pages of a sequence."""
    page_bytes = _token_bytes([layer.shape for layer in layout.layers], layout.itemsize, kv)
    return max(line_staging_bytes(layout, PIECE_BYTES), page_bytes), page_bytes, 0 if kv is None else kv.max_pages


def _token_bytes(shapes: Sequence[MixerShape], itemsize: int, kv: KvPlan | None) -> int:
    """Bytes of room for keys and values: PIECE_BYTES, but all of a model's where that is less, and at least one head of
    as many tokens as there can be."""
    if kv is None:
        return 0
    paged = [shape for shape in shapes if isinstance(shape, PagedShape)]
    head_bytes = kv.max_pages * kv.page_size * itemsize
    return max(
        head_bytes * max(shape.head_dim for shape in paged),
        min(PIECE_BYTES, head_bytes * sum(map(kept_values, paged))),
    )


def _entries(block: Tensor, shapes: Mapping[int, PagedShape], paged: Sequence[int]) -> list[tuple[int, Part]]:
    """Layer and part of each entry of a block: those of its sizes, in the order in which they were allocated."""
    found = []
    for number in paged:
        shape = shapes[number]
        if block.shape[3:] == (shape.num_kv_heads, shape.head_dim):
            found += [(number, part) for part in token_parts(shape)]
    return found


def _shaped(memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The beginning of bytes as a tensor."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _viewed(memory: Tensor, section: Section) -> Tensor:
    """A section in a state's bytes."""
    return _shaped(memory[section.offset :], WORDS[section.itemsize], section.shape)
