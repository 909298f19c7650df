"""Scheduled rows: rows of one pending step that one batch takes, and where their tokens and outputs lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.scheduling.pending import PendingStep, RowState
from deltaline_server.step import OutputRows, RowKind, count_kinds
from deltaline_server.tables.ledger import Slots

# The places of rows that all run.
ALL = slice(None)


class ScheduledRows:
    """Rows `taken` (positions in a pending step, int64 [n], in row order), `lengths` tokens of each, int64 [n].

    cursor: tokens of them that earlier batches took, the same for all. is_last: whether the rows are complete with
    these. A row that is cut is alone. num_tokens: of all rows. is_whole: whether they are the whole request, and all
    run. Those that run: index int64 [m], their positions in the admission; slots int64 [m], of their sequences;
    num_of_kind, how many there are of each kind; running, where they are among the taken ones. The others are padding;
    has_padding: whether there are any.
    """

    __slots__ = (
        "cursor",
        "has_padding",
        "index",
        "is_last",
        "is_whole",
        "lengths",
        "num_of_kind",
        "num_tokens",
        "pending",
        "running",
        "slots",
        "taken",
    )

    def __init__(
        self, pending: PendingStep, taken: NDArray[np.int64], lengths: NDArray[np.int64], cursor: int, is_last: bool
    ) -> None:
        self.pending, self.taken, self.lengths, self.cursor, self.is_last = pending, taken, lengths, cursor, is_last
        self.slots: Slots
        self.num_of_kind: Mapping[RowKind, int]
        self.index, self.has_padding = taken, False
        self.running: NDArray[np.int64] | slice = ALL
        if pending.has_padding:
            self.running = np.flatnonzero(pending.state[taken] == RowState.WAITING)
            self.index = taken[self.running]
            self.has_padding = len(self.index) < len(taken)
        self.is_whole = not pending.has_padding and is_last and not cursor and len(taken) == len(pending.state)
        if self.is_whole:
            self.slots, self.num_of_kind = pending.admission.slots, pending.num_of_kind
            self.num_tokens = len(pending.request.hidden)
        else:
            self.slots, self.num_of_kind = pending.admission.slots[self.index], count_kinds(pending.kind[self.index])
            self.num_tokens = int(lengths.sum())

    def again(self) -> ScheduledRows:
        """The same places, after some of the rows were refused: these are padding."""
        return ScheduledRows(self.pending, self.taken, self.lengths, self.cursor, self.is_last)

    def position(self) -> NDArray[np.int64]:
        """Tokens of each running row's sequence before these, int64 [m]."""
        position = self.pending.request.position
        return position if self.is_whole else position[self.pending.rows[self.index]] + self.cursor

    def hidden(self) -> NDArray[Any]:
        """The tokens' hidden states [tokens, width], packed in row order: a view when they lie side by side."""
        hidden = self.pending.request.hidden
        return (
            hidden if self.is_whole else hidden[token_range(self.pending.begin[self.taken] + self.cursor, self.lengths)]
        )

    def wanted(self, token: int) -> NDArray[np.int64]:
        """Which outputs go back, as places in a batch that has these rows at `token`, int64."""
        output = self.pending.form.output
        ends = token + np.cumsum(self.lengths)
        if output is OutputRows.ALL:
            places = token_range((ends - self.lengths)[self.running], self.lengths[self.running])
            return np.arange(places.start, places.stop) if isinstance(places, slice) else places
        if output is OutputRows.LAST and self.is_last:
            last: NDArray[np.int64] = ends[self.running] - 1
            return last
        return np.zeros(0, dtype=np.int64)

    def output_places(self) -> NDArray[np.int64] | slice:
        """Where the outputs go in the reply."""
        pending, output = self.pending, self.pending.form.output
        if output is OutputRows.NONE or (output is OutputRows.LAST and not self.is_last):
            return slice(0, 0)
        if self.is_whole:
            return slice(0, int(pending.output_start[-1]))
        starts = pending.output_start[pending.rows[self.index]]
        if output is OutputRows.LAST:
            return token_range(starts, np.ones(len(starts), dtype=np.int64))
        return token_range(starts + self.cursor, self.lengths[self.running])


def token_range(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Indices of tokens start .. start + length - 1 of each row: a slice when they are contiguous, else int64 [sum]."""
    if len(starts) == 0:
        return slice(0, 0)
    ends = starts + lengths
    if (starts[1:] == ends[:-1]).all():
        return slice(int(starts[0]), int(ends[-1]))
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
