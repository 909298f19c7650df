"""Waypoints of steps: where chunks get lines for the states that they leave, and what becomes of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.scheduling.pending import PendingStep
from deltaline_server.scheduling.queue import Queue
from deltaline_server.scheduling.scheduled_rows import ScheduledRows
from deltaline_server.step import LeftWaypoint, RowWaypoints
from deltaline_server.tables.captured.waypoints import WaypointTable
from deltaline_server.tables.ledger import Slots

NOWHERE = RowWaypoints(())


class Waypoints:
    """What the scheduler does for steps that have waypoints. Of others it is never told."""

    def __init__(self, table: WaypointTable, queue: Queue, pump_soon: Callable[[], None]) -> None:
        self.table, self._queue, self._pump_soon = table, queue, pump_soon

    def add(self, pending: PendingStep) -> None:
        """A step was queued: it is followed by the states that are to be left behind all of a row's tokens."""
        for row, asked in pending.form.waypoints.items():
            index = np.flatnonzero(pending.admission.rows == row)
            if asked.at_end and len(index):
                pending.ends.add(row)
                pending.num_unfinished += 1
                slots = pending.admission.slots[index]
                self._queue.places.take(slots, partial(self._reached, pending, row, int(slots[0])))

    def take(self, num_short: int, long: Sequence[ScheduledRows]) -> NDArray[np.int32] | None:
        """Lines for the places within the chunks of a batch behind its short rows, as StepBatch.waypoints."""
        entries: list[tuple[int, int, int]] = []
        for number, rows in enumerate(long, num_short):
            pending, begin = rows.pending, rows.cursor
            if not pending.left or not len(rows.index):
                continue
            (row,), (slot,) = pending.admission.rows[rows.index].tolist(), rows.slots.tolist()
            asked = pending.form.waypoints.get(row, NOWHERE)
            first, principal = int(pending.request.position[row]), pending.request.principal
            places = asked.within(begin, begin + rows.num_tokens)
            self.table.make_room(slot, [first + tokens for tokens in places], principal, asked.is_pinned)
            for i, tokens in enumerate(places):
                try:
                    line = self.table.take(pending.span, slot, first + tokens, principal, asked.is_pinned)
                    entries.append((number, tokens - begin, line))
                except RequestError as error:
                    reason = error.refusal.reason
                    if reason is not Reason.NO_SNAPSHOT_LINES:
                        pending.left[row].append(LeftWaypoint(first + tokens, skipped=reason.name))
                        continue
                    # There is none for those behind it either.
                    pending.left[row] += [LeftWaypoint(first + at, skipped=reason.name) for at in places[i:]]
                    break
        return np.array(entries, dtype=np.int32).T if entries else None

    def done(self, pending: PendingStep, index: NDArray[np.int64], slots: Slots) -> None:
        """Rows (positions in the admission, and their slots) of a step are done: its states are snapshots now."""
        for row, slot in zip(pending.admission.rows[index].tolist(), slots.tolist(), strict=True):
            asked = pending.form.waypoints.get(row)
            if asked is None:
                continue
            skipped, begin = {place.position for place in pending.left[row]}, int(pending.request.position[row])
            for position in (begin + tokens for tokens in asked.tokens):
                if position not in skipped:
                    place = self.table.done(pending.span, slot, position, asked)
                    pending.left[row] += [] if place is None else [place]

    def _reached(self, pending: PendingStep, row: int, slot: int, dropped: set[int]) -> None:
        """All steps before the place behind a row are over: leave a state there, unless the row was refused."""
        if row not in pending.ends:
            return
        pending.ends.remove(row)
        pending.num_unfinished -= 1
        place = self.table.at_end(pending.request, row, slot, pending.form.waypoints[row])
        pending.left[row] += [] if place is None else [place]
        if not pending.num_unfinished:
            self._queue.ended.append(pending)
            self._pump_soon()
