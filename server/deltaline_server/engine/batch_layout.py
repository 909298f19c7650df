"""How a batch lies in buffers: its layout, and how the control of its rows is written there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deltaline_kernels.rows import NUM_FIELDS, WAYPOINT_TOKENS
from deltaline_server.batch import StepBatch

# Bytes between whose multiples tensors of buffers begin.
ALIGNMENT = 256
# Of a page that begins: its line, its place there, its number.
NUM_PAGE_FIELDS = 3


@dataclass(frozen=True)
class Layout:
    """How a batch lies in buffers: rows and tokens in all, of which the first rows are for short ones.

    has_adapters: behind the control of the rows are the places of their adapters, as one more field. page_size: behind
    these are the pages that begin within the rows' tokens, as many as that can be; 0 where layers have no pages. Where
    there are rows that are not short, the table of their waypoints is behind that.
    """

    short_rows: int
    rows: int
    tokens: int
    has_adapters: bool = False
    page_size: int = 0

    @cached_property
    def fields(self) -> tuple[int, int]:
        """The shape of the control and of what else the rows have."""
        return NUM_FIELDS + self.has_adapters, self.rows + 1

    @cached_property
    def field_bytes(self) -> int:
        """Bytes of the fields; the pages are behind them."""
        return math.prod(self.fields) * 4

    @property
    def num_pages(self) -> int:
        """Most pages that begin within the rows' tokens: of n tokens at most n / page_size, rounded up."""
        return min(self.tokens, self.rows + self.tokens // self.page_size) if self.page_size else 0

    @cached_property
    def waypoint_begin(self) -> int:
        """Where the table of waypoints begins, in bytes."""
        return self.field_bytes + NUM_PAGE_FIELDS * self.num_pages * 4

    @property
    def num_waypoints(self) -> int:
        """Entries of the table of waypoints (Rows.waypoints), 0 where no row may have any."""
        return num_waypoints(self.tokens, self.rows) if self.rows > self.short_rows else 0

    @cached_property
    def control_bytes(self) -> int:
        return _aligned(self.waypoint_begin + self.num_waypoints * 4)

    @cached_property
    def size_bytes(self) -> int:
        return _aligned(self.tokens * 4)


def fill_control(fields: NDArray[np.int32], batch: StepBatch, layout: Layout) -> None:
    """Write a batch's control `[7, N + 1]` in a layout `[7, rows + 1]`; the other rows are empty and skipped."""
    control, short, num_rows = batch.control, batch.num_short, batch.control.shape[1] - 1
    if fields.shape == control.shape and short == layout.short_rows:
        fields[:] = control
        return
    first_long, end = layout.short_rows, layout.short_rows + num_rows - short
    fields[1:3] = -1
    fields[3:] = 0
    fields[:, :short] = control[:, :short]
    fields[0, short:first_long] = control[0, short]
    fields[:, first_long:end] = control[:, short:num_rows]
    fields[0, end:] = control[0, num_rows]


def fill_adapters(field: NDArray[np.int32], adapter_places: NDArray[np.int32], num_short: int, layout: Layout) -> None:
    """Write the places `[N]` of a batch's adapters in a layout `[rows + 1]`; the other rows have none."""
    first_long, end = layout.short_rows, layout.short_rows + len(adapter_places) - num_short
    field[num_short:] = -1
    field[:num_short] = adapter_places[:num_short]
    field[first_long:end] = adapter_places[num_short:]


def fill_pages(region: NDArray[np.int32], new_pages: NDArray[np.int32]) -> None:
    """Write pages `[3, n]` in a region `[3, at least n]`; behind them is page 0, which is line 0's."""
    count = new_pages.shape[1]
    region[:, :count] = new_pages
    region[:, count:] = 0


def num_waypoints(tokens: int, rows: int) -> int:
    """Entries of a table of waypoints (Rows.waypoints)."""
    return tokens // WAYPOINT_TOKENS + rows


def fill_waypoints(table: NDArray[np.int32], batch: StepBatch, short_rows: int) -> None:
    """Write a batch's waypoints in a table (Rows.waypoints) of rows of which so many are for short ones."""
    table[:] = -1
    if batch.waypoints is not None:
        rows, tokens, lines = batch.waypoints
        places = batch.control[0, rows] // WAYPOINT_TOKENS + rows + (short_rows - batch.num_short)
        table[places + tokens // WAYPOINT_TOKENS - 1] = lines


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
