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
from deltaline_server.observer import BatchTiming
from deltaline_server.sequences import SequenceTable
from deltaline_server.step import BatchResult, OutputRows, RowKind, StepBatch

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


@dataclass(frozen=True)
class Run:
    """A batch on the device: its pieces in order, and when it began (seconds on the scheduler's clock)."""

    span: int
    pieces: list[Piece]
    batch: StepBatch
    began_s: float

    @property
    def kinds(self) -> NDArray[np.uint8]:
        """The kind of each row, uint8 [N]."""
        return np.concatenate([piece.job.kind[piece.index] for piece in self.pieces])

    def answers_all(self, result: BatchResult) -> bool:
        """Whether, with this result, every job of the batch has all that it waits for."""
        return bool(result.finite.all()) and all(
            len(piece.index) == piece.job.num_unfinished and not piece.job.joins and piece.ends_row.all()
            for piece in self.pieces
        )

    def take_outputs(self, result: BatchResult) -> None:
        """Give each job its outputs and its share of the stages' times; to be called before cursors move."""
        taken = 0
        for piece in self.pieces:
            job, timing = piece.job, piece.job.timing
            if not timing.batch_rows:
                timing.queue_s = self.began_s - job.arrival_s
            timing.copy_in_s += result.copy_in_s
            timing.compute_s += result.compute_s
            timing.copy_out_s += result.copy_out_s
            timing.batch_rows, timing.batch_tokens = len(result.finite), self.batch.num_tokens
            if not result.failed:
                places = job.output_places(piece.index, piece.lengths)
                count = places.stop - places.start if isinstance(places, slice) else len(places)
                job.put_outputs(places, result.hidden[taken : taken + count])
                taken += count

    def timing(self, result: BatchResult) -> BatchTiming:
        """What the observer is told; to be called before cursors move."""
        queue_s = [
            np.where(piece.job.cursor[piece.index] == 0, self.began_s - piece.job.arrival_s, np.nan)
            for piece in self.pieces
        ]
        return BatchTiming(np.concatenate(queue_s), result.copy_in_s, result.compute_s, result.copy_out_s)


def runnable(job: Job, table: SequenceTable) -> NDArray[np.int64]:
    """Admitted rows (positions) that wait and whose predecessor is done."""
    admission = job.admission
    is_next = admission.step == table.ledger.done.step[job.request.span, admission.slots] + 1
    return np.flatnonzero((job.state == RowState.WAITING) & is_next)


def choose_pieces(jobs: Iterable[Job], table: SequenceTable, *, max_short: int, chunk_tokens: int) -> list[Piece]:
    """Rows that run next, short ones first: those with at most `max_short` tokens left.

    Long ones get at most `chunk_tokens` tokens together. Jobs are in the order in which they run. Rows are not marked;
    the caller does that.
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
        tuple(hidden),
        None if all_wanted else np.concatenate([*wanted, np.zeros(0, dtype=np.int64)]).astype(np.int64),
    )
