"""Batch forming: which rows of the waiting jobs run next, and how they are laid out for the engine.

Knows jobs, the ledger's order and the token budget; starts nothing. Decode, verify and other short rows go first and
whole; what is left of a batch goes to prefills, cut into chunks, so that no decode waits for a whole prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.job import Job, RowState, token_range
from deltaline_server.sequences import SequenceTable
from deltaline_server.step import OutputRows, RowKind, StepBatch

# Prefill chunks end on multiples of this many tokens, the chunk of the kernels, so that cutting moves no boundary of
# theirs.
CHUNK_ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """Rows of one job that run in a batch: positions in its admission, and how many tokens of each."""

    job: Job
    index: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def slots(self) -> NDArray[np.int64]:
        return self.job.admission.slots[self.index]

    @property
    def ends_row(self) -> NDArray[np.bool_]:
        """Which rows this chunk completes."""
        ends: NDArray[np.bool_] = self.job.cursor[self.index] + self.lengths == self.job.length[self.index]
        return ends


def runnable(job: Job, table: SequenceTable) -> NDArray[np.int64]:
    """Admitted rows (positions) that wait and whose predecessor is done."""
    admission = job.admission
    is_next = admission.step == table.ledger.done.step[job.request.span, admission.slots] + 1
    return np.flatnonzero((job.state == RowState.WAITING) & is_next)


def choose_pieces(jobs: Iterable[Job], table: SequenceTable, *, max_short: int, chunk_tokens: int) -> list[Piece]:
    """Rows that run next, short ones (at most `max_short` tokens left) first; at most `chunk_tokens` tokens of long
    ones.

    Jobs are in the order in which they run. Rows are not marked; the caller does that.
    """
    short: list[Piece] = []
    long: list[Piece] = []
    budget = chunk_tokens
    for job in jobs:
        index = runnable(job, table)
        if not len(index):
            continue
        left = job.length[index] - job.cursor[index]
        is_short = left <= max_short
        if is_short.any():
            short.append(Piece(job, index[is_short], left[is_short]))
        taken, lengths = [], []
        for i, tokens in zip(index[~is_short].tolist(), left[~is_short].tolist(), strict=True):
            chunk = tokens if tokens <= budget else budget - budget % CHUNK_ALIGNMENT
            if chunk <= 0:
                break
            taken.append(i)
            lengths.append(chunk)
            budget -= chunk
        if taken:
            long.append(Piece(job, np.array(taken, dtype=np.int64), np.array(lengths, dtype=np.int64)))
    return short + long


def lay_out(pieces: list[Piece], table: SequenceTable, *, max_short: int) -> StepBatch:
    """The batch of these pieces (short rows first, not empty, all of one span)."""
    span = pieces[0].job.request.span
    num_rows = sum(len(piece.index) for piece in pieces)
    control = np.zeros((6, num_rows + 1), dtype=np.int32)
    hidden: list[NDArray[Any]] = []
    wanted: list[NDArray[np.int64]] = []
    num_short = row = token = 0
    for piece in pieces:
        job, index, lengths, slots = piece.job, piece.index, piece.lengths, piece.slots
        rows = slice(row, row + len(index))
        ends = token + np.cumsum(lengths)
        control[0, row + 1 : row + len(index) + 1] = ends
        control[1, rows] = table.read_line[span, slots]
        control[2, rows] = table.write_line[slots]
        control[3, rows] = np.where(job.kind[index] == RowKind.VERIFY, 0, lengths)
        control[4, rows] = np.where(job.cursor[index] == 0, job.admission.num_replayed[index], 0)
        control[5, rows] = table.draft_half[span, slots]
        hidden.append(job.request.hidden[token_range(job.begin[index] + job.cursor[index], lengths)])
        if job.request.output is OutputRows.ALL:
            wanted.append(np.arange(token, ends[-1]))
        elif job.request.output is OutputRows.LAST:
            wanted.append(ends[piece.ends_row] - 1)
        num_short += int((lengths <= max_short).sum())
        row, token = row + len(index), int(ends[-1])
    all_wanted = all(piece.job.request.output is OutputRows.ALL for piece in pieces)
    return StepBatch(
        span,
        control,
        num_short,
        hidden[0] if len(hidden) == 1 else np.concatenate(hidden),
        None if all_wanted else np.concatenate([*wanted, np.zeros(0, dtype=np.int64)]).astype(np.int64),
    )
