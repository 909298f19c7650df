"""How scheduled rows are laid out for the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.batch import StepBatch
from deltaline_server.scheduling.adapters.batch_adapters import NO_PLACE, BatchAdapters
from deltaline_server.scheduling.scheduled_rows import ScheduledRows
from deltaline_server.step import OutputRows, RowKind
from deltaline_server.tables.sequences import SequenceTable


def lay_out(
    scheduled: list[ScheduledRows],
    table: SequenceTable,
    num_short: int,
    adapters: BatchAdapters | None = None,
    waypoints: NDArray[np.int32] | None = None,
) -> StepBatch:
    """The batch of these rows (not empty, all of one span, the `num_short` short ones first).

    adapters: has taken those of all rows; None where none has any. waypoints: the batch's.
    """
    first = scheduled[0].pending
    span, num_rows = first.span, 0
    for rows in scheduled:
        num_rows += len(rows.taken)
    control = np.zeros((7, num_rows + 1), dtype=np.int32)
    read_line, draft_half = table.read_line[span], table.draft_half[span]
    row = token = copied_bytes = 0
    hidden, wants_all = [], True
    for rows in scheduled:
        pending, slots, end = rows.pending, rows.slots, row + len(rows.taken)
        ends = pending.form.query_start_loc[1:] if rows.is_whole else rows.lengths.cumsum()
        control[0, row + 1 : end + 1] = ends + token if token else ends
        fields, running = control[:, row:end], rows.running
        if rows.has_padding:
            fields[1:3] = -1
        fields[1, running] = read_line.take(slots)
        fields[2, running] = table.write_line.take(slots)
        fields[3, running] = rows.lengths[running]
        if rows.num_of_kind[RowKind.VERIFY]:
            fields[3, pending.kind[rows.taken] == RowKind.VERIFY] = 0
        if pending.admission.has_replays and not rows.cursor:
            fields[4, running] = pending.admission.num_replayed[rows.index]
        fields[5, running] = draft_half.take(slots)
        fields[6, running] = rows.position()
        row, token = end, token + rows.num_tokens
        tokens = rows.hidden()
        hidden.append(tokens)
        if not pending.request.is_input_shared:
            copied_bytes += tokens.nbytes
        wants_all &= pending.form.output is OutputRows.ALL and not rows.has_padding
    if table.captured or table.num_frozen_reads:
        table.lines.check_batch(control[1, :-1], control[2, :-1])
        if table.pages is not None and span in table.pages.spans:
            table.pages.check_batch(control[2, :-1], control[6, :-1])
    wanted = None if wants_all else _wanted(scheduled)
    into = () if first.request.output_memory is None else _into(scheduled)
    if not into:
        copied_bytes += (token if wanted is None else len(wanted)) * first.form.shapes.output_bytes
    places, new_pages = None if adapters is None else _adapter_places(scheduled, num_rows, adapters), None
    if table.pages is not None and span in table.pages.spans:
        new_pages = table.pages.begun(control[2, :-1], control[6, :-1], np.diff(control[0]))
    return StepBatch(span, control, num_short, tuple(hidden), wanted, into, copied_bytes, places, new_pages, waypoints)


def _adapter_places(scheduled: list[ScheduledRows], num_rows: int, adapters: BatchAdapters) -> NDArray[np.int32] | None:
    """Where each row's adapter is on the device, int32 [num_rows]; None when no row has one."""
    places, row = np.full(num_rows, NO_PLACE, dtype=np.int32), 0
    for rows in scheduled:
        end = row + len(rows.taken)
        if rows.pending.adapters is not None and len(rows.index):
            places[row:end][rows.running] = adapters.places_of(rows.pending.adapters[rows.index])
        row = end
    return places if np.count_nonzero(places != NO_PLACE) else None


def _into(scheduled: list[ScheduledRows]) -> tuple[NDArray[Any], ...]:
    """Where the outputs of each row go, if all of them go to shared memory; else nothing."""
    into: list[NDArray[Any]] = []
    for rows in scheduled:
        places = rows.output_places()
        if rows.pending.request.output_memory is None or not isinstance(places, slice):
            return ()
        into.append(rows.pending.outputs[places])
    return tuple(into)


def _wanted(scheduled: list[ScheduledRows]) -> NDArray[np.int64]:
    """The packed tokens whose outputs go back, int64."""
    token, wanted = 0, []
    for rows in scheduled:
        wanted.append(rows.wanted(token))
        token += rows.num_tokens
    return np.concatenate(wanted)
