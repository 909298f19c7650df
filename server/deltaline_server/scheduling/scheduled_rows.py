"""Scheduled rows: rows of one pending step that one batch takes, and where their tokens and outputs lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.scheduling.pending import PendingStep
from deltaline_server.step import OutputRows, RowKind, count_kinds
from deltaline_server.tables.ledger import Slots


class ScheduledRows:
    """Rows `index` (positions in the admission, int64 [n]) of a pending step, `lengths` tokens of each, int64 [n].

    cursor: tokens of them that earlier batches took, the same for all. is_last: whether the rows are complete with
    these. A row that is cut is alone. slots int64 [n]: those of the rows' sequences. num_tokens: of all rows.
    is_whole: whether they are the whole request, in row order. num_of_kind: how many rows there are of each kind.
    """

    __slots__ = ("cursor", "index", "is_last", "is_whole", "lengths", "num_of_kind", "num_tokens", "pending", "slots")

    def __init__(
        self, pending: PendingStep, index: NDArray[np.int64], lengths: NDArray[np.int64], cursor: int, is_last: bool
    ) -> None:
        self.pending, self.index, self.lengths, self.cursor, self.is_last = pending, index, lengths, cursor, is_last
        self.slots: Slots
        self.num_of_kind: Mapping[RowKind, int]
        self.is_whole = pending.is_whole and is_last and not cursor and len(index) == len(pending.state)
        if self.is_whole:
            self.slots, self.num_of_kind = pending.admission.slots, pending.num_of_kind
            self.num_tokens = len(pending.request.hidden)
        else:
            self.slots, self.num_of_kind = pending.admission.slots[index], count_kinds(pending.kind[index])
            self.num_tokens = int(lengths.sum())

    def without(self, dropped: list[int]) -> ScheduledRows:
        """The same but for these rows (positions in the admission)."""
        kept = ~np.isin(self.index, dropped)
        return ScheduledRows(self.pending, self.index[kept], self.lengths[kept], self.cursor, self.is_last)

    def position(self) -> NDArray[np.int64]:
        """Tokens of each row's sequence before these, int64 [n]."""
        position = self.pending.request.position
        return position if self.is_whole else position[self.pending.admission.rows[self.index]] + self.cursor

    def hidden(self) -> NDArray[Any]:
        """The tokens' hidden states [tokens, width], packed in row order: a view when they lie side by side."""
        hidden = self.pending.request.hidden
        return (
            hidden if self.is_whole else hidden[token_range(self.pending.begin[self.index] + self.cursor, self.lengths)]
        )

    def wanted(self, token: int) -> NDArray[np.int64]:
        """Which outputs go back, as places in a batch that has these rows at `token`, int64."""
        output = self.pending.form.output
        if output is OutputRows.ALL:
            return np.arange(token, token + self.num_tokens)
        if output is OutputRows.LAST and self.is_last:
            return token - 1 + np.cumsum(self.lengths)
        return np.zeros(0, dtype=np.int64)

    def output_places(self) -> NDArray[np.int64] | slice:
        """Where the outputs go in the reply."""
        pending, output = self.pending, self.pending.form.output
        if output is OutputRows.NONE or (output is OutputRows.LAST and not self.is_last):
            return slice(0, 0)
        if self.is_whole:
            return slice(0, int(pending.output_start[-1]))
        starts = pending.output_start[pending.admission.rows[self.index]]
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
