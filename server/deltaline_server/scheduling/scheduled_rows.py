"""A piece: rows of one job that one batch takes, and where their tokens and outputs lie.

Knows one job; not what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.scheduling.pending import Job
from deltaline_server.step import OutputRows, RowKind, count_kinds
from deltaline_server.tables.admission import Slots


@dataclass(eq=False)
class Piece:
    """Rows `index` (positions in the job's admission, int64 [n]), `lengths` tokens of each, int64 [n].

    cursor: tokens of them that earlier batches took, the same for all. ends: whether the rows are complete with this
    piece. A row that is cut is a piece of its own.
    """

    job: Job
    index: NDArray[np.int64]
    lengths: NDArray[np.int64]
    cursor: int
    ends: bool

    @cached_property
    def is_whole(self) -> bool:
        """Whether the piece is the whole request, in row order."""
        return self.job.is_whole and self.ends and not self.cursor and len(self.index) == len(self.job.state)

    @cached_property
    def slots(self) -> Slots:
        slots = self.job.admission.slots
        return slots if self.is_whole else slots[self.index]

    @cached_property
    def num_of_kind(self) -> Mapping[RowKind, int]:
        """How many rows there are of each kind."""
        if self.is_whole:
            return self.job.num_of_kind
        return count_kinds(self.job.kind[self.index])

    @property
    def position(self) -> NDArray[np.int64]:
        """Tokens of each row's sequence before this piece's, int64 [n]."""
        position = self.job.request.position
        return position if self.is_whole else position[self.job.admission.rows[self.index]] + self.cursor

    def without(self, dropped: list[int]) -> Piece:
        """The piece without these rows (positions in the admission)."""
        kept = ~np.isin(self.index, dropped)
        return Piece(self.job, self.index[kept], self.lengths[kept], self.cursor, self.ends)

    def hidden(self) -> NDArray[Any]:
        """The tokens' hidden states [tokens, width], packed in row order: a view when they lie side by side."""
        request = self.job.request
        if self.is_whole:
            return request.hidden
        return request.hidden[token_range(self.job.begin[self.index] + self.cursor, self.lengths)]

    def wanted(self, token: int) -> NDArray[np.int64] | None:
        """Which outputs go back, as places in a batch that has the piece at `token`, int64; None for all of them."""
        output = self.job.form.output
        if output is OutputRows.ALL:
            return None
        if output is OutputRows.LAST and self.ends:
            return token - 1 + np.cumsum(self.lengths)
        return np.zeros(0, dtype=np.int64)

    def output_places(self) -> NDArray[np.int64] | slice:
        """Where the outputs go in the job's reply."""
        job, output = self.job, self.job.form.output
        if output is OutputRows.NONE or (output is OutputRows.LAST and not self.ends):
            return slice(0, 0)
        if self.is_whole:
            return slice(0, int(job.output_start[-1]))
        starts = job.output_start[job.admission.rows[self.index]]
        if output is OutputRows.LAST:
            return token_range(starts, np.ones(len(starts), dtype=np.int64))
        return token_range(starts + self.cursor, self.lengths)


def token_range(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Indices of tokens start .. start + length - 1 of each row: a slice when they are contiguous, else int64 [sum]."""
    if len(starts) == 0:
        return slice(0, 0)
    ends = starts + lengths
    if (starts[1:] == ends[:-1]).all():
        return slice(int(starts[0]), int(ends[-1]))
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
