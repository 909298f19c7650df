"""States that prefills leave on their way, from when lines are taken for them until they are snapshots, or are none.

The state of a place is one line, to which every span's layers write when the chunk that has the place within it runs.
Its first span takes the line; behind the chunk of its last one the pages of its tokens are shared. It is a snapshot
once the step of the last span is done. Until then the line is nobody's to read, and it goes back where the sequence
ends, its state can't be trusted, or a span goes by without naming the place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.principal import Principal
from deltaline_server.step import LeftWaypoint, RowWaypoints, StepRequest
from deltaline_server.tables.captured.capture import Capture, Needs
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.prefixes.keys import PrefixKeys
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequences import SequenceTable


@dataclass(eq=False)
class _Way:
    """A state that is under way. taken: spans of which a chunk writes it; done: those of them whose step is done."""

    slot: int
    state: CapturedState
    owner: Principal
    taken: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class WaypointTable:
    """States under way, by slot and position. All methods belong to the table's thread."""

    def __init__(self, table: SequenceTable, capture: Capture, snapshots: SnapshotTable) -> None:
        self._table, self._capture, self._snapshots, self._device = table, capture, snapshots, snapshots.device
        self.of_slot: dict[int, dict[int, _Way]] = {}
        """What is under way, by slot and position; changed here alone."""
        self._num_of: defaultdict[int, int] = defaultdict(int)
        # Those whose pages are to be shared behind the batch that is being formed, and the copies that takes.
        self._whole: list[_Way] = []
        self._num_copies = 0

    # -- places within chunks --------------------------------------------------------------------------------------

    def make_room(self, slot: int, positions: Sequence[int], principal: Principal, is_pinned: bool) -> None:
        """Let snapshots give way at once for the lines of all places of a slot that have none yet; if not all can have
        one, none gives way, and `take` sees for each by itself."""
        ways = self.of_slot.get(slot, {})
        count, num_under_way = sum(one not in ways for one in positions), self._num_of[principal.number]
        with suppress(RequestError):
            self._snapshots.shares.check(count, principal, is_pinned, num_under_way)
            self._device.make_room(Needs(count), np.array([slot]), len(self._device.under_way) + count)

    def take(self, span: int, slot: int, position: int, principal: Principal, is_pinned: bool) -> int:
        """The line for what a slot's layers of a span are at a position, within a chunk of the batch that is formed.

        Raises RequestError NO_SNAPSHOT_LINES, PAGES_EXHAUSTED, QUOTA_EXCEEDED or SPANS_UNEVEN; then there will be none.
        """
        table, way = self._table, self.of_slot.get(slot, {}).get(position)
        if way is None and (np.delete(table.ledger.done.position[:, slot], span) >= position).any():
            raise RequestError(Reason.SPANS_UNEVEN, "another span has gone by, and left nothing here")
        is_last = len(way.taken if way else ()) == table.ledger.num_spans - 1
        is_cut = is_last and table.pages is not None and table.pages.is_cut(position)
        try:
            needs = Needs(way is None, self._num_copies + is_cut)
            num_under_way = self._num_of[principal.number]
            self._snapshots.shares.check(needs.lines, principal, is_pinned, num_under_way)
            self._device.make_room(needs, np.array([slot]), len(self._device.under_way) + needs.lines)
        except RequestError:
            if way is not None:
                self._drop(way)
            raise
        if way is None:
            way = _Way(slot, self._capture.leave(slot, position), principal)
            self.of_slot.setdefault(slot, {})[position] = way
            self._num_of[principal.number] += 1
            self._device.under_way.add(way.state)
        way.taken.add(span)
        if is_last:
            self._whole.append(way)
            self._num_copies += is_cut
        return int(way.state.read_line[0])

    def share_pages(self) -> None:
        """The batch for which lines were taken was submitted: share the pages of the states that it makes whole."""
        whole, self._whole, self._num_copies = self._whole, [], 0
        for way, state in zip(whole, self._capture.share_pages([(way.slot, way.state) for way in whole]), strict=True):
            self._device.under_way.remove(way.state)
            self._device.under_way.add(state)
            way.state = state

    def done(self, span: int, slot: int, position: int, asked: RowWaypoints) -> LeftWaypoint | None:
        """The step of a span is done for which a line was taken: what became of the place, None while other spans have
        yet to come to it."""
        way = self.of_slot.get(slot, {}).get(position)
        if way is None:
            return LeftWaypoint(position, b"", Reason.SPANS_UNEVEN.name)
        way.done.add(span)
        if len(way.done) < self._table.ledger.num_spans:
            return None
        self._forget(way)
        try:
            key = PrefixKeys.one(asked.keys.get(position, b""), position)
            id = self._snapshots.adopt(slot, way.state, key, way.owner, asked.lease_s, asked.is_pinned)
        except RequestError as error:
            self._capture.release(way.state)
            return LeftWaypoint(position, b"", error.refusal.reason.name)
        return LeftWaypoint(position, id)

    def pass_by(self, span: int, slots: Slots) -> None:
        """Steps of slots are done on a span: what was under way where it has gone by is given up."""
        for slot in self.of_slot.keys() & slots.tolist():
            for position, way in list(self.of_slot[slot].items()):
                if span not in way.taken and position <= self._table.ledger.done.position[span, slot]:
                    self._drop(way)

    def drop(self, slot: int) -> None:
        """The sequence in a slot is over, or its state can't be trusted: nothing of it is under way any more."""
        for way in list(self.of_slot.get(slot, {}).values()):
            self._drop(way)

    # -- behind a step ---------------------------------------------------------------------------------------------

    def at_end(self, request: StepRequest, row: int, slot: int, asked: RowWaypoints) -> LeftWaypoint | None:
        """A row's step is done, and no step behind it has begun: a snapshot of the sequence as it is.

        Returns what became of it, None while other spans have yet to come there.
        """
        table, form = self._table, request.form
        position = int(request.position[row] + form.lengths[row])
        state = table.lookup(form.server_epoch, form.handle[row : row + 1], request.principal)[1][0]
        if state != SequenceState.OPEN:
            return LeftWaypoint(position, b"", table.refusal(state, slot, form.span).reason.name)
        if (table.ledger.done.position[:, slot] < position).any():
            return None
        progress, key = table.ledger.captured(slot), asked.keys.get(position, b"")
        if isinstance(progress, Refusal):
            return LeftWaypoint(position, b"", Reason.SPANS_UNEVEN.name)
        try:
            slots = np.array([slot])
            [made] = self._snapshots.create(
                slots, [progress], request.principal, asked.lease_s, asked.is_pinned, [key] if key else ()
            )
        except RequestError as error:
            return LeftWaypoint(position, b"", error.refusal.reason.name)
        return LeftWaypoint(position, made.id)

    def check_integrity(self) -> None:
        """Raise ValueError unless what is under way agrees with who counts it."""
        ways = [(slot, position, way) for slot, by in self.of_slot.items() for position, way in by.items()]
        if any((way.slot, way.state.position) != (slot, position) for slot, position, way in ways):
            raise ValueError("waypoint table: a state is under way elsewhere")
        if {way.state for _, _, way in ways} != self._device.under_way or self._whole:
            raise ValueError("waypoint table: what is under way and what is counted disagree")
        if sum(self._num_of.values()) != len(ways) or not all(self.of_slot.values()):
            raise ValueError("waypoint table: principals and their counts disagree")

    def _drop(self, way: _Way) -> None:
        self._forget(way)
        self._capture.release(way.state)

    def _forget(self, way: _Way) -> None:
        of_slot = self.of_slot[way.slot]
        del of_slot[way.state.position]
        if not of_slot:
            del self.of_slot[way.slot]
        self._num_of[way.owner.number] -= 1
        self._device.under_way.remove(way.state)
