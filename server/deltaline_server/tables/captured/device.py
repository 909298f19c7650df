"""The snapshots that lie on the device: what they take there, which of them stay, and which give way."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from deltaline_server.errors import RequestError
from deltaline_server.tables.captured.capture import NO_SLOTS, Capture, Needs
from deltaline_server.tables.captured.room import Room
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.prefixes.eviction import Eviction
from deltaline_server.tables.sequences import SequenceTable

# Snapshots for each line there is: those of a state that is captured again and again share its line.
PER_LINE = 4


class DeviceTier:
    """Captured states as snapshots have them. All methods belong to the table's thread."""

    def __init__(self, table: SequenceTable, capture: Capture, give_way: Callable[[bytes], None]) -> None:
        """give_way: told of each snapshot that has to leave, which then is taken off."""
        self._table, self._capture, self._give_way = table, capture, give_way
        self.limit = PER_LINE * (table.lines.num_lines + 1)
        self.eviction = Eviction(self.limit)
        self.room = Room(self.eviction, table.lines, capture, table.ledger.num_spans)
        self.num_pinned: defaultdict[int, int] = defaultdict(int)
        """Pinned ones, by their owner's number."""
        self.under_way: set[CapturedState] = set()
        """States that are no snapshots yet (waypoints.py)."""
        # Those that must stay while they are used, and by how many.
        self._uses = Counter[bytes]()
        if table.pages is not None:
            table.pages.num_givable, table.pages.make_room = self.room.num_pages, self._make_room_for_pages

    def __len__(self) -> int:
        return len(self.eviction)

    def put(
        self, id: bytes, state: CapturedState, owner: int, is_pinned: bool, continues: bytes | None, size: int
    ) -> None:
        """A snapshot takes room from now on. continues, size: as Eviction.stored has them."""
        self.eviction.stored(id, state.position, continues, owner=owner, size=size)
        if is_pinned:
            self.num_pinned[owner] += 1
            self.eviction.pin(id, True)
        else:
            self.room.add(id, state)

    def take_off(self, id: bytes, state: CapturedState, owner: int, is_pinned: bool) -> None:
        """A snapshot takes no room any more, as soon as nobody uses it."""
        self.num_pinned[owner] -= is_pinned
        self.room.remove(id)
        self.eviction.gone(id)
        self._capture.release(state)

    @contextmanager
    def using(self, id: bytes, state: CapturedState, is_pinned: bool) -> Iterator[None]:
        """Inside the context a snapshot does not give way, and its lines and pages stay even if it ends."""
        self._uses[id] += 1
        if not is_pinned:
            self.room.remove(id)
            self.eviction.pin(id, True)
        with self._capture.using(state):
            try:
                yield
            finally:
                self._uses[id] -= 1
                if not self._uses[id]:
                    del self._uses[id]
                    if id in self.eviction and not is_pinned:
                        self.eviction.pin(id, False)
                        self.room.add(id, state)

    @contextmanager
    def copying(self, id: bytes, state: CapturedState, is_pinned: bool) -> Iterator[None]:
        """As `using`, for as long as a copy takes: meanwhile the pool's spare line stands in for the snapshot's, so
        that others need not wait; behind it one gives way if there are too many."""
        lines = self._table.lines
        may_lend = not is_pinned and lines.num_freezable >= 0
        lines.num_lent += may_lend
        try:
            with self.using(id, state, is_pinned):
                yield
        finally:
            lines.num_lent -= may_lend
            with suppress(RequestError):  # all are used; the next that needs a line makes room for two
                self.make_room(Needs())

    def make_room(
        self, needs: Needs, slots: Slots = NO_SLOTS, num_snapshots: int = 0, kept: Collection[bytes] = ()
    ) -> None:
        """Let unpinned snapshots, but those to be kept, give way until what is needed is there; slots: that need it.

        Raises RequestError NO_SNAPSHOT_LINES or PAGES_EXHAUSTED; then none has.
        """
        lines, pages = self._table.lines, self._table.pages
        if needs.lines > lines.num_freezable:
            self._capture.thaw(slots)
        num_over = len(self) + num_snapshots - self.limit
        lacking = Needs(needs.lines - lines.num_freezable, 0 if pages is None else needs.pages - pages.num_free)
        for id in self.room.victims(lacking, num_over, slots, kept):
            self._give_way(id)
        if needs.lines > lines.num_freezable:
            self._capture.thaw(slots)

    def _make_room_for_pages(self, num_pages: int) -> None:
        """Let unpinned snapshots give way until so many more pages are free. Raises RequestError PAGES_EXHAUSTED."""
        for id in self.room.victims(Needs(pages=num_pages), 0, NO_SLOTS):
            self._give_way(id)

    def check_integrity(self, states: Mapping[bytes, tuple[CapturedState, int, bool]]) -> None:
        """Raise ValueError unless it is these that lie here; of each its state, its owner, and whether it is pinned."""
        others = self.under_way | self._capture.leaving
        if {state for state, _, _ in states.values()} | others != self._table.captured:
            raise ValueError("snapshot table: snapshots and captured states disagree")
        if any(id not in self.eviction for id in states) or not len(states) == len(self.eviction) <= self.limit:
            raise ValueError("snapshot table: other snapshots lie on the device than are told to, or too many")
        pinned = Counter(owner for _, owner, is_pinned in states.values() if is_pinned)
        if pinned != +Counter(self.num_pinned):
            raise ValueError("snapshot table: principals and their counts of pinned ones disagree")
        may_go = {id: state for id, (state, _, is_pinned) in states.items() if not is_pinned and not self._uses[id]}
        self.room.check_integrity(may_go)
