"""Batches: how chosen pieces are laid out for the engine, and a batch on its way through it.

Knows pieces and the table's lines; chooses and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.scheduling.batch_adapters import NO_SLOT, BatchAdapters
from deltaline_server.scheduling.observer import BatchTiming
from deltaline_server.scheduling.scheduled_rows import Piece
from deltaline_server.step import BatchResult, OutputRows, RowKind, StepBatch
from deltaline_server.tables.sequences import SequenceTable


@dataclass
class Run:
    """A batch in the engine: its pieces in order, and times on the scheduler's clock.

    began_s: when the device came to it, as far as is known. predicted_s: how long it was expected to compute. adapters:
    those that it has taken, None where no sequence has any.
    """

    span: int
    pieces: list[Piece]
    batch: StepBatch
    submitted_s: float
    began_s: float
    adapters: BatchAdapters | None = None
    predicted_s: float = 0.0

    @property
    def num_long_tokens(self) -> int:
        """Tokens of long rows."""
        control, num_short = self.batch.control, self.batch.num_short
        return int(control[0, -1] - control[0, num_short])

    def take_outputs(self, result: BatchResult) -> None:
        """Give each job its outputs and, once however many pieces of it are here, the stages' times."""
        taken, num_rows, num_tokens = 0, len(result.finite), self.batch.num_tokens
        hidden, into = result.hidden, self.batch.into
        for job in dict.fromkeys(piece.job for piece in self.pieces):
            timing = job.timing
            if not timing.batch_rows:
                timing.queue_s = self.began_s - job.arrival_s
            timing.copy_in_s += result.copy_in_s
            timing.compute_s += result.compute_s
            timing.copy_out_s += result.copy_out_s
            timing.batch_rows, timing.batch_tokens = num_rows, num_tokens
        for number, piece in enumerate(self.pieces):
            job = piece.job
            if result.failed:
                continue
            places = piece.output_places()
            if result.is_placed:
                job.put_outputs(places, into[number])
            else:
                count = places.stop - places.start if isinstance(places, slice) else len(places)
                job.put_outputs(places, hidden[taken : taken + count] if len(self.pieces) > 1 else hidden)
                taken += count

    def answer(self, result: BatchResult) -> bool:
        """Complete the jobs of which this result is all that they wait for; tell whether there was one."""
        all_finite, row, has_answered = bool(result.finite.all()), 0, False
        for piece in self.pieces:
            job, end = piece.job, row + len(piece.index)
            is_last = piece.ends and end - row == job.num_unfinished
            if is_last and not (job.joins or job.is_marred) and (all_finite or result.finite[row:end].all()):
                job.finish()
                has_answered = True
            row = end
        return has_answered

    def timing(self, result: BatchResult, busy_s: float) -> BatchTiming:
        """What the observer is told. busy_s: what the device's busy time grew by."""
        num_of_kind = dict.fromkeys(RowKind, 0)
        queued: list[tuple[RowKind, int, float]] = []
        for piece in self.pieces:
            waited_s = self.began_s - piece.job.arrival_s
            for kind, count in piece.num_of_kind.items():
                if count:
                    num_of_kind[kind] += count
                    if not piece.cursor:
                        queued.append((kind, count, waited_s))
        timing = BatchTiming(
            num_of_kind, self.batch.num_tokens, queued, result.copy_in_s, result.compute_s, result.copy_out_s, busy_s
        )
        timing.began_s, timing.pieces = self.began_s, self.pieces
        if self.batch.adapter_slots is not None:
            slots = self.batch.adapter_slots[self.batch.adapter_slots != NO_SLOT]
            timing.num_adapter_rows, timing.num_adapters = len(slots), len(np.unique(slots))
        return timing


def lay_out(
    pieces: list[Piece], table: SequenceTable, num_short: int, adapters: BatchAdapters | None = None
) -> StepBatch:
    """The batch of these pieces (not empty, all of one span, the `num_short` short rows first).

    adapters: has taken those of all rows; None where none has any.
    """
    span = pieces[0].job.span
    num_rows = sum(len(piece.index) for piece in pieces)
    control = np.zeros((7, num_rows + 1), dtype=np.int32)
    read_line, draft_half = table.read_line[span], table.draft_half[span]
    row = token = 0
    for piece in pieces:
        job, slots, end = piece.job, piece.slots, row + len(piece.index)
        ends = job.form.query_start_loc[1:] if piece.is_whole else piece.lengths.cumsum()
        control[0, row + 1 : end + 1] = ends + token if token else ends
        control[1, row:end] = read_line.take(slots)
        control[2, row:end] = table.write_line.take(slots)
        control[3, row:end] = piece.lengths
        if piece.num_of_kind[RowKind.VERIFY]:
            control[3, row:end][job.kind[piece.index] == RowKind.VERIFY] = 0
        if job.admission.has_replays and not piece.cursor:
            control[4, row:end] = job.admission.num_replayed[piece.index]
        control[5, row:end] = draft_half.take(slots)
        control[6, row:end] = piece.position
        row, token = end, token + int(ends[-1])
    hidden = tuple(piece.hidden() for piece in pieces)
    adapter_slots = None if adapters is None else _adapter_slots(pieces, num_rows, adapters)
    wanted, into, new_pages = _wanted(pieces), _into(pieces), None
    if table.pages is not None and span in table.pages.spans:
        new_pages = table.pages.begun(control[2, :-1], control[6, :-1], np.diff(control[0]))
    copied_bytes = sum(
        array.nbytes for piece, array in zip(pieces, hidden, strict=True) if not piece.job.request.is_input_shared
    )
    if not into:
        copied_bytes += (token if wanted is None else len(wanted)) * pieces[0].job.form.ends.output_bytes
    return StepBatch(span, control, num_short, hidden, wanted, into, copied_bytes, adapter_slots, new_pages)


def _adapter_slots(pieces: list[Piece], num_rows: int, adapters: BatchAdapters) -> NDArray[np.int32] | None:
    """The slot of each row's adapter, int32 [num_rows], None when no row has one."""
    if all(piece.job.adapters is None for piece in pieces):
        return None
    slots, row = np.full(num_rows, NO_SLOT, dtype=np.int32), 0
    for piece in pieces:
        end = row + len(piece.index)
        if piece.job.adapters is not None:
            slots[row:end] = adapters.slots_of(piece.job.adapters[piece.index])
        row = end
    return slots if np.count_nonzero(slots != NO_SLOT) else None


def _into(pieces: list[Piece]) -> tuple[NDArray[Any], ...]:
    """Where the outputs of each piece go, if all of them go to shared memory; else nothing."""
    if any(piece.job.request.output_memory is None for piece in pieces):
        return ()
    places = [piece.output_places() for piece in pieces]
    if not all(isinstance(place, slice) for place in places):
        return ()
    return tuple(piece.job.outputs[place] for piece, place in zip(pieces, places, strict=True))


def _wanted(pieces: list[Piece]) -> NDArray[np.int64] | None:
    """The packed tokens whose outputs go back, None for all."""
    if all(piece.job.form.output is OutputRows.ALL for piece in pieces):
        return None
    token, wanted = 0, []
    for piece in pieces:
        count = int(piece.lengths.sum())
        places: NDArray[Any] | None = piece.wanted(token)
        wanted.append(np.arange(token, token + count) if places is None else places)
        token += count
    return np.concatenate(wanted)
