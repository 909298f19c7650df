"""The canonical layout written plainly, for comparison: lines and tokens put into it, and taken out of it.

Works on arrays of unsigned integers, whatever floats they mean: bits are moved, never values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.layers.shapes import RecurrentShape
from deltaline_server.snapshots.layout import Bytes, Part, Section, StateLayout, conv_parts

Array = NDArray[Any]


@dataclass(frozen=True)
class LineArrays:
    """One line of a recurrent layer: conv `[columns, D]`, recurrent `[HV, V, K]`, drafts `[2, M, record]`."""

    conv: Array
    recurrent: Array
    drafts: Array


@dataclass(frozen=True)
class TokenArrays:
    """Keys and values of an attention layer, `[tokens, HKV, D]`, in the order of the tokens."""

    keys: Array
    values: Array


LayerArrays = LineArrays | TokenArrays


@dataclass(frozen=True)
class SpanArrays:
    """What a span has beside its layers: fixed commits int64 `[n, 3]`, and a kept reply."""

    commits: Array
    reply: bytes = b""


def pack(
    layout: StateLayout,
    sections: Sequence[Section],
    layers: Mapping[int, LayerArrays],
    spans: Mapping[int, SpanArrays],
    memory: Bytes,
) -> None:
    """Fill a state's memory uint8 [state_bytes(sections)], every byte of it.

    layers: by number. Columns, records and tokens beyond those of the sections are passed over. spans: by index, those
    that have sections.
    """
    end = 0
    for section in sections:
        memory[end : section.offset] = 0
        end = section.offset + section.num_bytes
        section.view(memory)[...] = (
            _of_span(section, spans) if _is_of_span(section) else _of_layer(layout, section, layers)
        )
    memory[end:] = 0


def unpack(
    layout: StateLayout, sections: Sequence[Section], memory: Bytes, layers: Mapping[int, LayerArrays]
) -> dict[int, SpanArrays]:
    """Fill lines and tokens from a state's memory: what its sections don't hold becomes zero. Return its spans'."""
    for arrays in layers.values():
        for array in (arrays.conv, arrays.drafts) if isinstance(arrays, LineArrays) else (arrays.keys, arrays.values):
            array[...] = 0
    commits: dict[int, Array] = {}
    replies: dict[int, bytes] = {}
    for section in sections:
        view = section.view(memory)
        if section.part is Part.COMMITS:
            commits[section.number] = view.view(np.int64).copy()
        elif section.part is Part.REPLY:
            replies[section.number] = view.tobytes()
        else:
            _of_layer(layout, section, layers)[...] = view
    none = np.zeros((0, 3), dtype=np.int64)
    return {index: SpanArrays(commits.get(index, none), replies.get(index, b"")) for index in range(layout.num_spans)}


def _is_of_span(section: Section) -> bool:
    return section.part in (Part.COMMITS, Part.REPLY)


def _of_span(section: Section, spans: Mapping[int, SpanArrays]) -> Array:
    """What a section of a span holds."""
    span = spans[section.number]
    if section.part is Part.REPLY:
        return np.frombuffer(span.reply, dtype=np.uint8)
    return span.commits.view(np.uint64)


def _of_layer(layout: StateLayout, section: Section, layers: Mapping[int, LayerArrays]) -> Array:
    """The part of a layer's arrays that a section holds: a view of the section's shape."""
    arrays, part = layers[section.number], section.part
    if isinstance(arrays, TokenArrays):
        tokens = arrays.keys if part is Part.KEYS else arrays.values
        return tokens[: section.shape[1]].transpose(1, 0, 2)
    if part is Part.RECURRENT:
        return arrays.recurrent
    shape = next(layer.shape for layer in layout.layers if layer.number == section.number)
    assert isinstance(shape, RecurrentShape)
    if part in (Part.DRAFT_KEYS, Part.DRAFT_UPDATES, Part.DRAFT_GATES):
        return _drafts(section, arrays.drafts[section.half], shape)
    first = 0
    for each, heads, size in conv_parts(shape):
        if each is part:
            break
        first += heads * size
    return _by_head(arrays.conv, section, first)


def _drafts(section: Section, records: Array, shape: RecurrentShape) -> Array:
    """A section of one half of the drafts `[M, record]`, whose records are key | update | gates."""
    if section.part is Part.DRAFT_KEYS:
        return _by_head(records, section, 0)
    if section.part is Part.DRAFT_UPDATES:
        return _by_head(records, section, shape.key_channels)
    first = shape.key_channels + shape.value_channels
    if len(section.shape) == 3:  # a gate of each key channel
        return _by_head(records, section, first)
    return records[: section.shape[1], first:].T


def _by_head(rows: Array, section: Section, first: int) -> Array:
    """Channels of leading rows `[rows, channels]`, from `first` on, as a view `[heads, rows, channels of a head]`."""
    heads, count, size = section.shape
    return rows[:count, first : first + heads * size].reshape(count, heads, size).transpose(1, 0, 2)
