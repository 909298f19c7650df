"""What rank 0 tells the other ranks, as integers: a header, which says how many more there are, and those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_kernels.rows import NUM_FIELDS
from deltaline_server.batch import StepBatch
from deltaline_server.engine.batch_layout import NUM_PAGE_FIELDS
from deltaline_server.tables.pages import PagesPlaced

HEADER_FIELDS = 7
# Integers of every first message: enough for a decode of 64 rows.
FIRST_INTEGERS = 1024
# In place of a number, where a batch has None.
ABSENT = -1
# Of a waypoint: its row, its tokens there, its line.
NUM_WAYPOINT_FIELDS = 3

Integers = NDArray[np.int32]


class Order(IntEnum):
    """What the ranks are to do; the first field of a header."""

    END = 0
    PREPARE = 1
    COMPUTE = 2
    ZERO = 3
    PLACE_PAGES = 4
    TRANSFER = 5


def batch_order(batch: StepBatch) -> tuple[Integers, Integers]:
    """Return header and integers of a batch: all of it but its hidden states, which the layers broadcast, and what of
    its output goes where."""
    pages, waypoints = (ABSENT if one is None else one.shape[1] for one in (batch.new_pages, batch.waypoints))
    num_rows, has_adapters = batch.control.shape[1] - 1, batch.adapter_places is not None
    header = _header(Order.COMPUTE, batch.span, num_rows, batch.num_short, has_adapters, pages, waypoints)
    return header, _packed(batch.control, batch.adapter_places, batch.new_pages, batch.waypoints)


def batch_of(header: Sequence[int], integers: Integers) -> StepBatch:
    """Return the batch that was told, without hidden states, and of which no output is wanted."""
    _, span, _, num_short, has_adapters, pages, waypoints = header
    control, adapters, new_pages, places = _unpacked(integers, _batch_shapes(header))
    return StepBatch(
        span,
        control,
        num_short,
        (),
        wanted=np.empty(0, dtype=np.int64),
        adapter_places=adapters if has_adapters else None,
        new_pages=None if pages == ABSENT else new_pages,
        waypoints=None if waypoints == ABSENT else places,
    )


def zero_order(lines: NDArray[np.int64]) -> tuple[Integers, Integers]:
    """Return header and integers of lines that are to be zeroed."""
    return _header(Order.ZERO, len(lines)), _packed(lines)


def transfer_order(told: Integers) -> tuple[Integers, Integers]:
    """Return header and integers of what is to be copied between the device's memory and the host's."""
    return _header(Order.TRANSFER, len(told)), told


def place_order(placed: PagesPlaced) -> tuple[Integers, Integers]:
    """Return header and integers of pages that are to be placed and copied."""
    return _header(Order.PLACE_PAGES, *placed.pages.shape, placed.copies.shape[1]), _packed(
        placed.lines, placed.pages, placed.copies
    )


def placed_of(header: Sequence[int], integers: Integers) -> PagesPlaced:
    """Return the pages that were told."""
    lines, pages, copies = _unpacked(integers, _shapes(header))
    return PagesPlaced(lines.astype(np.int64), pages, copies.astype(np.int64))


def bare_order(order: Order) -> tuple[Integers, Integers]:
    """Return the header of an order that has no more integers."""
    return _header(order), _packed()


def messages_of(header: Integers, integers: Integers) -> list[Integers]:
    """Return what is sent of an order: a message of one size, and what it has no room for."""
    room = FIRST_INTEGERS - HEADER_FIELDS
    first = np.zeros(FIRST_INTEGERS, dtype=np.int32)
    first[:HEADER_FIELDS] = header
    first[HEADER_FIELDS : HEADER_FIELDS + len(integers)] = integers[:room]
    return [first, integers[room:]] if len(integers) > room else [first]


def opened(first: Integers) -> tuple[list[int], Integers, Integers]:
    """Return an order's header, room for all of its integers, of which the first message's are there, and the part of
    it that a second message fills."""
    header = first[:HEADER_FIELDS].tolist()
    integers = np.empty(num_integers(header), dtype=np.int32)
    room = FIRST_INTEGERS - HEADER_FIELDS
    integers[:room] = first[HEADER_FIELDS:][: len(integers)]
    return header, integers, integers[room:]


def num_integers(header: Sequence[int]) -> int:
    """Return how many integers follow a header."""
    return sum(map(math.prod, _shapes(header)))


def _shapes(header: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The shapes of what follows a header."""
    if header[0] == Order.COMPUTE:
        return _batch_shapes(header)
    if header[0] in (Order.ZERO, Order.TRANSFER):
        return ((header[1],),)
    if header[0] == Order.PLACE_PAGES:
        _, lines, most, copies, *_ = header
        return (lines,), (lines, most), (2, copies)
    return ()


def _batch_shapes(header: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    _, _, rows, _, has_adapters, pages, waypoints = header
    return (
        (NUM_FIELDS, rows + 1),
        (rows * has_adapters,),
        (NUM_PAGE_FIELDS, max(pages, 0)),
        (NUM_WAYPOINT_FIELDS, max(waypoints, 0)),
    )


def _header(order: Order, *fields: int) -> Integers:
    header = np.zeros(HEADER_FIELDS, dtype=np.int32)
    header[: 1 + len(fields)] = order, *fields
    return header


def _packed(*arrays: NDArray[Any] | None) -> Integers:
    parts = [one.ravel().astype(np.int32) for one in arrays if one is not None]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _unpacked(integers: Integers, shapes: Sequence[tuple[int, ...]]) -> list[Integers]:
    ends = np.cumsum([0, *map(math.prod, shapes)]).tolist()
    return [integers[begin:end].reshape(shape) for (begin, end), shape in zip(pairwise(ends), shapes, strict=True)]
