"""Captured states between the pool and host memory: gathered into the canonical layout, and scattered from it.

Recurrent states are copied where they lie; conv columns, drafts, keys and values go by way of staging memory beside the
pool, so that what crosses is few large runs. Bits are moved, never values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaline_server.layers.kv_cache import KvPlan
from deltaline_server.layers.shapes import AttentionShape, MixerShape, RecurrentShape
from deltaline_server.layers.state_pool import LayerState, StatePool
from deltaline_server.snapshots.layout import Bytes, Part, Section, SpanProgress, StateLayout, conv_parts
from deltaline_server.tables.lines import NULL_LINE

# Keys and values that cross at once, at least: enough for the link's full speed.
TOKEN_BYTES = 32 << 20
_SMALL = frozenset(Part) - {Part.COMMITS, Part.REPLY, Part.RECURRENT, Part.KEYS, Part.VALUES}
_WORDS = {2: torch.int16, 4: torch.int32}

Commits = NDArray[np.int64]


@dataclass(frozen=True)
class StatePlace:
    """Where a state lies in the pool: the line of each span, NULL_LINE where none was begun, and its pages in order."""

    lines: tuple[int, ...]
    pages: NDArray[np.int32]


class StateTransfer:
    """Gathers and scatters states of one pool, one at a time: on a stream of the caller's where the device has some.

    What it begins has ended once the device is done with that stream; until then nobody may write what is read.
    """

    def __init__(self, layout: StateLayout, numbers: Sequence[int], pool: StatePool) -> None:
        """Allocate the staging memory. numbers: in the checkpoint, of the pool's layers."""
        self._layout = layout
        self._layers = dict(zip(numbers, pool.layers, strict=True))
        self._shapes = {layer.number: (layer.span, layer.shape) for layer in layout.layers}
        paged = [number for number in numbers if isinstance(self._shapes[number][1], AttentionShape)]
        self._blocks = [(_words(block), _entries(block, self._shapes, paged)) for block in pool.page_blocks]
        shapes = [shape for _, shape in self._shapes.values()]
        with torch.inference_mode(False):  # a thread writes to it that need not be in that mode
            self._small = torch.zeros(_small_bytes(layout), dtype=torch.uint8, device=pool.device)
            size = _token_bytes(shapes, layout.itemsize, pool.kv)
            self._beside, self._ordered = (torch.zeros(size, dtype=torch.uint8, device=pool.device) for _ in range(2))
            max_pages = 0 if pool.kv is None else pool.kv.max_pages
            self._pages = torch.zeros(max_pages, dtype=torch.int64, device=pool.device)

    def gather(self, spans: Sequence[SpanProgress], place: StatePlace, commits: Commits, memory: Bytes) -> None:
        """Begin to fill a state's memory uint8 [state_bytes], every byte of it, from the pool.

        commits: int64 [n, 3], those that are fixed, kept with span 0.
        """
        sections, host = self._layout.sections(spans), torch.from_numpy(memory)
        for section in sections:
            if section.part is Part.RECURRENT:
                _viewed(host, section).copy_(self._part(section, place), non_blocking=True)
            elif section.part is Part.COMMITS:
                section.view(memory).view(np.int64)[...] = commits
        small, begin, end = _range(sections)
        staged = self._small[: end - begin].zero_()
        for section in small:
            _viewed(staged, section, begin).copy_(self._part(section, place))
        host[begin:end].copy_(staged, non_blocking=True)
        self._gather_tokens(sections, place.pages, host)
        for section in sections:
            if section.part not in _SMALL:
                memory[section.offset + section.num_bytes : section.end] = 0

    def scatter(self, spans: Sequence[SpanProgress], place: StatePlace, memory: Bytes) -> None:
        """Begin to put a state from its memory into the pool: into lines that nobody reads, of which what the state
        does not hold becomes zero, and pages, as many as its tokens need."""
        sections, host = self._layout.sections(spans), torch.from_numpy(memory)
        for number, state in self._layers.items():
            line = place.lines[self._shapes[number][0]]
            if isinstance(state, LayerState) and line != NULL_LINE:
                state.conv[line].zero_()
                state.drafts[line].zero_()
        begun = [one for one in sections if one.part not in (Part.COMMITS, Part.REPLY) and self._is_begun(one, place)]
        for section in begun:
            if section.part is Part.RECURRENT:
                self._part(section, place).copy_(_viewed(host, section), non_blocking=True)
        small, begin, end = _range(begun)
        staged = self._small[: end - begin]
        staged.copy_(host[begin:end], non_blocking=True)
        for section in small:
            self._part(section, place).copy_(_viewed(staged, section, begin))
        self._scatter_tokens(sections, place.pages, host)

    def commits(self, spans: Sequence[SpanProgress], memory: Bytes) -> Commits:
        """The fixed commits of a state in memory, int64 [n, 3]."""
        for section in self._layout.sections(spans):
            if section.part is Part.COMMITS:
                found: Commits = section.view(memory).view(np.int64).copy()
                return found
        return np.zeros((0, 3), dtype=np.int64)

    # -- lines -----------------------------------------------------------------------------------------------------

    def _is_begun(self, section: Section, place: StatePlace) -> bool:
        return place.lines[self._shapes[section.number][0]] != NULL_LINE

    def _part(self, section: Section, place: StatePlace) -> Tensor:
        """What a section holds of its layer's line, as a view of the section's shape."""
        span, shape = self._shapes[section.number]
        state, line = self._layers[section.number], place.lines[span]
        assert isinstance(shape, RecurrentShape)
        if section.part is Part.RECURRENT:
            return _words(state.recurrent[line])
        if section.part not in (Part.DRAFT_KEYS, Part.DRAFT_UPDATES, Part.DRAFT_GATES):
            first = 0
            for part, heads, size in conv_parts(shape):
                if part is section.part:
                    break
                first += heads * size
            return _by_head(_words(state.conv[line]), section, first)
        records = _words(state.drafts[line, section.half])
        if section.part is Part.DRAFT_KEYS:
            return _by_head(records, section, 0)
        if section.part is Part.DRAFT_UPDATES:
            return _by_head(records, section, shape.key_channels)
        return records[: section.shape[1], shape.key_channels + shape.value_channels :].T

    # -- pages -----------------------------------------------------------------------------------------------------

    def _gather_tokens(self, sections: Sequence[Section], pages: NDArray[np.int32], host: Tensor) -> None:
        for block, taken, ordered, targets, index in self._pieces(sections, pages, host):
            torch.index_select(block, 1, index, out=taken)
            tokens = ordered.shape[2]
            ordered.copy_(taken.flatten(1, 2)[:, :tokens].transpose(1, 2))
            for target, values in zip(targets, ordered, strict=True):
                target.copy_(values, non_blocking=True)

    def _scatter_tokens(self, sections: Sequence[Section], pages: NDArray[np.int32], host: Tensor) -> None:
        for block, taken, ordered, sources, index in self._pieces(sections, pages, host):
            for source, values in zip(sources, ordered, strict=True):
                values.copy_(source, non_blocking=True)
            by_token, tokens = taken.flatten(1, 2), ordered.shape[2]
            by_token[:, tokens:].zero_()
            by_token[:, :tokens].copy_(ordered.transpose(1, 2))
            block.index_copy_(1, index, taken)

    def _pieces(
        self, sections: Sequence[Section], pages: NDArray[np.int32], host: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor]]:
        """Keys and values, as many layers at once as staging memory has room for, else as many heads of one.

        Yields part of a block `[n, all pages, page_size, H, D]`, room for its pages `[n, pages, page_size, H, D]`, room
        for the tokens `[n, H, tokens, D]`, n places in host memory `[H, tokens, D]`, and the pages, int64.
        """
        found: dict[tuple[int, Part], Section] = {
            (one.number, one.part): one for one in sections if one.part in (Part.KEYS, Part.VALUES)
        }
        if not found:
            return
        tokens = next(iter(found.values())).shape[1]
        index = self._pages[: len(pages)]
        index.copy_(torch.from_numpy(pages.astype(np.int64)))
        for block, entries in self._blocks:
            page_size, num_heads, size = block.shape[2:]
            head_bytes = len(pages) * page_size * size * block.itemsize
            num_heads_at_once = min(num_heads, len(self._beside) // head_bytes)
            count = max(1, len(self._beside) // (head_bytes * num_heads))
            for i in range(0, len(entries), count):
                for head in range(0, num_heads, num_heads_at_once):
                    part = block[i : i + count, :, :, head : head + num_heads_at_once]
                    n, heads = part.shape[0], part.shape[3]
                    taken = _shaped(self._beside, block.dtype, (n, len(pages), page_size, heads, size))
                    ordered = _shaped(self._ordered, block.dtype, (n, heads, tokens, size))
                    places = [_viewed(host, found[entry])[head : head + heads] for entry in entries[i : i + count]]
                    yield part, taken, ordered, places, index


def staging_bytes(layout: StateLayout, kv: KvPlan | None) -> int:
    """Bytes of a transfer's memory on the device."""
    shapes = [layer.shape for layer in layout.layers]
    max_pages = 0 if kv is None else kv.max_pages
    return _small_bytes(layout) + 2 * _token_bytes(shapes, layout.itemsize, kv) + max_pages * torch.int64.itemsize


def _small_bytes(layout: StateLayout) -> int:
    """Most bytes of what is neither recurrent state nor keys and values."""
    most = SpanProgress(records_0=layout.max_draft, records_1=layout.max_draft)
    _, begin, end = _range(layout.sections([most] * layout.num_spans))
    return end - begin


def _token_bytes(shapes: Sequence[MixerShape], itemsize: int, kv: KvPlan | None) -> int:
    """Bytes of room for keys and values: TOKEN_BYTES, but all of a model's where that is less, and at least one head of
    as many tokens as there can be."""
    if kv is None:
        return 0
    heads = [(shape.num_kv_heads, shape.head_dim) for shape in shapes if isinstance(shape, AttentionShape)]
    head_bytes = kv.max_pages * kv.page_size * itemsize
    return max(
        head_bytes * max(size for _, size in heads),
        min(TOKEN_BYTES, head_bytes * 2 * sum(count * size for count, size in heads)),
    )


def _entries(block: Tensor, shapes: dict[int, tuple[int, MixerShape]], paged: Sequence[int]) -> list[tuple[int, Part]]:
    """Layer and part of each entry of a block: those of its sizes, in the order in which they were allocated."""
    found = []
    for number in paged:
        shape = shapes[number][1]
        assert isinstance(shape, AttentionShape)
        if block.shape[3:] == (shape.num_kv_heads, shape.head_dim):
            found += [(number, Part.KEYS), (number, Part.VALUES)]
    return found


def _range(sections: Sequence[Section]) -> tuple[list[Section], int, int]:
    """The sections that go by way of staging memory, which follow each other, and where they begin and end."""
    small = [section for section in sections if section.part in _SMALL]
    return (small, small[0].offset, small[-1].end) if small else (small, 0, 0)


def _words(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    return tensor.view(_WORDS[tensor.itemsize])


def _shaped(memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The beginning of bytes as a tensor."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _viewed(memory: Tensor, section: Section, begin: int = 0) -> Tensor:
    """A section in bytes of which the first is the state's byte `begin`."""
    return _shaped(memory[section.offset - begin :], _WORDS[section.itemsize], section.shape)


def _by_head(rows: Tensor, section: Section, first: int) -> Tensor:
    """Channels of leading rows `[rows, channels]`, from `first` on, as a view `[heads, rows, channels of a head]`."""
    heads, count, size = section.shape
    return rows[:count, first : first + heads * size].view(count, heads, size).transpose(0, 1)
