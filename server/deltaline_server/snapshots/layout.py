"""The canonical layout of one captured state: which sections its bytes have, where, and the order of values in them.

It is the same on every tier and at any number of ranks, and follows from the model's shapes and the progress of each
span alone. A section has its heads first, so that a rank's part of it is one run of bytes; what a sequence has not
written has no place in it. Knows sizes, not memory of a device; VERSION changes when any of this does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.layers.shapes import (
    Mamba1Shape,
    Mamba2Shape,
    MixerShape,
    PagedShape,
    RecurrentShape,
    ShortConvShape,
)
from deltaline_server.tables.ledger import MAX_FIXED_COMMITS

Bytes = NDArray[np.uint8]

VERSION = 2
ALIGNMENT = 64
MAX_STATE_BYTES = 1 << 48
MAX_REPLY_BYTES = 1 << 31
# Of steps, positions and the like: half of what their 64 bits hold, so that sums of two can't wrap.
MAX_COUNT = (1 << 62) - 1
COMMIT_FIELDS = 3
# Fields whose limits are a server's own.
_LIMITED = frozenset({"position", "pending", "replay", "records_0", "records_1"})
_FP32 = 4
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class LayoutError(ValueError):
    """A state can't have such a progress; the message names the field, what was expected and what came."""


class NoRoom(LayoutError):
    """A state has more tokens or drafts than this server's sequences."""


class Part(IntEnum):
    """What a section holds. Numbers are written into files: they are never used again for something else."""

    COMMITS = 1
    """Of a span, fixed commits int64 `[n, 3]`: the verify's position and ordinal, and its accepted count."""
    REPLY = 2
    """Of a span, its kept reply, uint8 `[n]`; empty in a snapshot."""
    RECURRENT = 3
    """`[HV, V, K]` (Mamba2 `[H, P, S]`, Mamba-1 `[HV, V, S]`) in the state's dtype; a short convolution has none."""
    CONV_Q = 4
    """`[H, columns, K]`, and so on, in the model's dtype."""
    CONV_K = 5
    CONV_V = 6
    CONV_X = 7
    CONV_B = 8
    CONV_C = 9
    DRAFT_KEYS = 10
    """Of one half, `[H, records, K]` fp32."""
    DRAFT_UPDATES = 11
    """Of one half, `[HV, records, V]` fp32."""
    DRAFT_GATES = 12
    """Of one half, `[HV, records]` fp32; of KDA `[HV, records, K]`, of Mamba-1 `[HV, records, V]`."""
    KEYS = 13
    """`[HKV, tokens, D]` in the model's dtype, in the order of tokens; those that went ahead are left out. Of
    latents `[1, tokens, C + R]`, which have no values beside them."""
    VALUES = 14


@dataclass(frozen=True)
class SpanProgress:
    """Where a state is on one span: the ledger's fields of it, and how much of each kind its sections hold.

    draft_half: the half that holds the drafts of the last verify. records_0, records_1: of each half, leading records
    that are kept: of draft_half at least those to replay, or pending. num_commits: fixed commits. reply_bytes: of the
    kept reply. ahead: leading tokens whose keys and values went ahead, and have no place here.
    """

    step: int = 0
    position: int = 0
    pending: int = 0
    replay: int = 0
    zero_commits: int = 0
    committed_step: int = 0
    committed_accepted: int = 0
    draft_half: int = 0
    records_0: int = 0
    records_1: int = 0
    num_commits: int = 0
    reply_bytes: int = 0
    ahead: int = 0

    @classmethod
    def captured(
        cls, *, step: int, position: int, replay: int, zero_commits: int, draft_half: int, num_commits: int
    ) -> SpanProgress:
        """Of a snapshot: nothing is pending, no reply is kept, and no more records than are replayed."""
        records = {"records_1" if draft_half else "records_0": replay}
        return cls(step, position, 0, replay, zero_commits, draft_half=draft_half, num_commits=num_commits, **records)

    @property
    def records(self) -> tuple[int, int]:
        """Records that are kept of each half."""
        return self.records_0, self.records_1

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are kept: committed ones, and those of a pending verify."""
        return self.position + self.pending

    @property
    def values(self) -> tuple[int, ...]:
        """All fields in their order."""
        return astuple(self)


NUM_PROGRESS_FIELDS = len(fields(SpanProgress))


@dataclass(frozen=True, slots=True)
class Section:
    """One section. number: of its layer, or of its span. shape: its heads come first. offset: from the state's first
    byte; sections follow each other at multiples of ALIGNMENT, and the bytes between them are zero."""

    part: Part
    number: int
    half: int
    offset: int
    shape: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def end(self) -> int:
        """Where the next section begins."""
        return -(-(self.offset + self.num_bytes) // ALIGNMENT) * ALIGNMENT

    def view(self, memory: Bytes) -> NDArray[Any]:
        """The section in a state's memory uint8 [n], as unsigned integers of its item's size; writes go through."""
        part = memory[self.offset : self.offset + self.num_bytes]
        values: NDArray[Any] = part.view(_UNSIGNED[self.itemsize]).reshape(self.shape)
        return values

    def share(self, rank: int, world_size: int) -> tuple[int, int]:
        """Offset and length of a rank's whole heads; several ranks have the same one where there are fewer heads.

        Raises ValueError where the heads can't be dealt out. Not for sections of a span, which every rank has whole.
        """
        heads = self.shape[0]
        if heads % world_size and world_size % heads:
            raise ValueError(f"world_size: expected a divisor or a multiple of {heads} heads, got {world_size}")
        count = max(heads // world_size, 1)
        head_bytes = self.num_bytes // heads
        return self.offset + rank * heads // world_size * head_bytes, count * head_bytes


@dataclass(frozen=True)
class StateLayer:
    """A mixer of a served layer: the layer's number in the checkpoint, the index of its span, and the mixer's shape
    over all ranks. A layer may have two, one with lines and one with pages."""

    number: int
    span: int
    shape: MixerShape


@dataclass(frozen=True)
class StateLayout:
    """What follows for every state of one server.

    itemsize: bytes of an element of hidden states; state_itemsize: of recurrent states. max_draft, max_tokens: records
    and tokens that this server's lines and pages have room for; 0 tokens for no limit.
    """

    layers: tuple[StateLayer, ...]
    num_spans: int
    itemsize: int
    state_itemsize: int
    max_draft: int
    max_tokens: int = 0

    @cached_property
    def pages(self) -> StateLayout:
        """What follows for keys and values that go ahead of the rest: states of the layers that keep such."""
        return replace(self, layers=tuple(layer for layer in self.layers if isinstance(layer.shape, PagedShape)))

    @cached_property
    def paged_spans(self) -> frozenset[int]:
        """Spans some layers of which keep keys and values."""
        return frozenset(layer.span for layer in self.pages.layers)

    def sections(self, spans: Sequence[SpanProgress]) -> tuple[Section, ...]:
        """Return the sections of a state with this progress, in their order; empty ones are left out.

        Raises LayoutError, before anything is allocated: a number of spans, a field or a size is out of range.
        """
        return self._known_sections(tuple(spans))

    @cached_property
    def _known_sections(self) -> Callable[[tuple[SpanProgress, ...]], tuple[Section, ...]]:
        # Of one state they are asked for several times on its way, at last by the thread that copies it.
        return lru_cache(maxsize=16)(self._make_sections)

    def _make_sections(self, spans: tuple[SpanProgress, ...]) -> tuple[Section, ...]:
        if len(spans) != self.num_spans:
            raise LayoutError(f"spans: expected {self.num_spans}, got {len(spans)}")
        for index, progress in enumerate(spans):
            self._check(index, progress)
        found, offset = [], 0
        for part, number, half, shape, itemsize in self._parts(spans):
            section = Section(part, number, half, offset, shape, itemsize)
            if section.num_bytes:
                found.append(section)
                offset = section.end
                if offset > MAX_STATE_BYTES:
                    raise LayoutError(f"size: expected at most {MAX_STATE_BYTES} bytes, got more than {offset}")
        return tuple(found)

    def _check(self, index: int, progress: SpanProgress) -> None:
        """Raise LayoutError unless a span's progress is one that a sequence of this server can have."""
        # The limit of positions is told with what is pending, which comes first.
        limits = (
            {"pending": self.max_draft}
            | {field.name: MAX_COUNT for field in fields(progress)}
            | {
                "pending": self.max_draft,
                "draft_half": 1,
                "replay": self.max_draft,
                "records_0": self.max_draft,
                "records_1": self.max_draft,
                "num_commits": MAX_FIXED_COMMITS,
                "reply_bytes": MAX_REPLY_BYTES,
                "ahead": progress.position,
            }
        )
        if self.max_tokens and index in self.paged_spans:
            limits["position"] = self.max_tokens - progress.pending
        for name, limit in limits.items():
            value = getattr(progress, name)
            if not 0 <= value <= limit:
                kind = NoRoom if name in _LIMITED and value > limit else LayoutError
                raise kind(f"spans[{index}].{name}: expected 0 .. {limit}, got {value}")
        needed, kept = progress.replay + progress.pending, progress.records[progress.draft_half]
        if kept < needed:
            raise LayoutError(f"spans[{index}].records_{progress.draft_half}: expected at least {needed}, got {kept}")

    def _parts(self, spans: Sequence[SpanProgress]) -> Iterator[tuple[Part, int, int, tuple[int, ...], int]]:
        """Yield part, number, half, shape and itemsize of every section, in their order."""
        for index, progress in enumerate(spans):
            yield Part.COMMITS, index, 0, (progress.num_commits, COMMIT_FIELDS), 8
            yield Part.REPLY, index, 0, (progress.reply_bytes,), 1
        recurrent = [
            (layer.number, spans[layer.span], layer.shape)
            for layer in self.layers
            if isinstance(layer.shape, RecurrentShape)
        ]
        for number, _, shape in recurrent:
            yield Part.RECURRENT, number, 0, shape.state, self.state_itemsize
        for number, progress, shape in recurrent:
            columns = shape.conv_width - 1 + progress.records[progress.draft_half]
            for part, heads, size in conv_parts(shape):
                yield part, number, 0, (heads, columns, size), self.itemsize
        for number, progress, shape in recurrent:
            for half, records in enumerate(progress.records):
                if shape.record:
                    yield Part.DRAFT_KEYS, number, half, (shape.num_key_heads, records, shape.key_dim), _FP32
                    yield Part.DRAFT_UPDATES, number, half, (shape.num_value_heads, records, shape.value_dim), _FP32
                    gates = () if shape.head_gates == 1 else (shape.head_gates,)
                    yield Part.DRAFT_GATES, number, half, (shape.num_value_heads, records, *gates), _FP32
        for layer in self.layers:
            if isinstance(layer.shape, PagedShape):
                progress = spans[layer.span]
                tokens = layer.shape.num_kv_heads, progress.num_tokens - progress.ahead, layer.shape.head_dim
                for part in token_parts(layer.shape):
                    yield part, layer.number, 0, tokens, self.itemsize


def conv_parts(shape: RecurrentShape) -> tuple[tuple[Part, int, int], ...]:
    """Return what the channels of a convolution are, in their order in a line: part, heads, channels of a head."""
    keys = shape.num_key_heads, shape.key_dim
    values = shape.num_value_heads, shape.value_dim
    if isinstance(shape, Mamba1Shape | ShortConvShape):
        return ((Part.CONV_X, *values),)
    if isinstance(shape, Mamba2Shape):
        return (Part.CONV_X, *values), (Part.CONV_B, *keys), (Part.CONV_C, *keys)
    return (Part.CONV_Q, *keys), (Part.CONV_K, *keys), (Part.CONV_V, *values)


def token_parts(shape: PagedShape) -> tuple[Part, ...]:
    """Return what is kept of tokens in pages, in the order of a layer's tensors."""
    return (Part.KEYS, Part.VALUES)[: shape.page_parts]


def state_bytes(sections: Sequence[Section]) -> int:
    """Bytes of a state that has these sections."""
    return sections[-1].end if sections else 0
