"""Capturing: a sequence's state becomes immutable and the sequence goes on beside it; others begin from it.

No state is copied but the last page of keys and values where it is not full. The line that a sequence's next step would
read is frozen and becomes the captured state's, and the sequence writes another from that step on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Refusal, RequestError
from deltaline_server.principal import Principal
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.ledger import CommittedProgress, Slots
from deltaline_server.tables.lines import NULL_LINE
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.pages import Pages, PagesPlaced
from deltaline_server.tables.sequence_adapters import BASE, BoundAdapter
from deltaline_server.tables.sequences import SequenceTable

NO_SLOTS: Slots = np.zeros(0, dtype=np.int64)
NO_PAGES: Pages = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Needs:
    """What capturing or restoring takes: lines that may be frozen, and free pages."""

    lines: int = 0
    pages: int = 0


class Capture:
    """Captures states of sequences in a table, and restores them. All methods belong to the table's thread."""

    def __init__(self, table: SequenceTable, place: Callable[[PagesPlaced], None]) -> None:
        """place: lets the device write rows of its table of pages and copy pages, before the next batch runs."""
        self._table, self._place = table, place
        # How many read or write a state's lines and pages; those of them that nobody else holds any more.
        self._uses = Counter[CapturedState]()
        self.leaving = set[CapturedState]()

    def line_holders(self, busy: Slots) -> NDArray[np.int64]:
        """How many hold each line, int64 [lines]. Who has one to itself, and can be given it back by `thaw`, is not
        counted."""
        return self._idle_readers(busy)[0]

    def thaw(self, busy: Slots) -> None:
        """Give frozen lines back to be written that no state holds any more, only a sequence that has not stepped
        since: it lets go of the line that it would have written instead. busy: slots that are to be left alone."""
        table = self._table
        others, reader = self._idle_readers(busy)
        for line in np.flatnonzero((others == 0) & (reader >= 0)).tolist():
            slot = int(reader[line])
            old_line = int(table.write_line[slot])
            table.lines.thaw(line)
            table.write_line[slot] = line
            table.num_frozen_reads -= int((table.read_line[:, slot] == line).sum())
            if table.pages is not None:
                self._place(table.pages.move(old_line, line))
            table.lines.release([old_line])

    def _idle_readers(self, busy: Slots) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each line, int64 [lines]: how many hold it beside the one slot that reads it, has written nothing since
        and can be given it back; and that slot, -1 where there is none such, or several.

        A slot writes one line, so of several that it reads it can be given one back: the one that fewest others hold.
        """
        table = self._table
        read_line, others = table.read_line, table.lines.references()
        is_own = read_line == table.write_line
        spans, slots = np.nonzero((read_line != NULL_LINE) & ~is_own)
        lines = read_line[spans, slots]
        first, last = np.full(len(others), table.num_slots), np.full(len(others), -1)
        np.minimum.at(first, lines, slots)
        np.maximum.at(last, lines, slots)
        is_idle = np.append(~is_own.any(axis=0), False)
        is_idle[busy] = False
        reader = np.where((first == last) & is_idle[first], last, -1)
        beside = others - np.bincount(lines, minlength=len(others))
        idle = np.flatnonzero(reader >= 0)
        idle = idle[np.argsort(beside[idle], kind="stable")]
        own = idle[np.unique(reader[idle], return_index=True)[1]]
        only = np.full_like(reader, -1)
        others[own], only[own] = beside[own], reader[own]
        return others, only

    def progress(self, slots: Slots) -> list[CommittedProgress]:
        """How far slots are. Raises RequestError VERIFY_PENDING or SPANS_UNEVEN where a state would mean nothing."""
        progress = []
        for slot in slots.tolist():
            found = self._table.ledger.captured(slot)
            if isinstance(found, Refusal):
                raise RequestError(found.reason, found.message, metadata=found.metadata)
            progress.append(found)
        return progress

    def needs(self, slots: Slots, progress: Sequence[CommittedProgress], children: int = 0) -> Needs:
        """What capturing slots takes, and restoring each `children` times, of which each may need a page."""
        table = self._table
        num_written = int((table.read_line[:, slots] == table.write_line[slots]).any(axis=0).sum())
        cut = 0 if table.pages is None else sum(table.pages.is_cut(one.position) for one in progress)
        return Needs(num_written, cut * (1 + children))

    def needs_of(self, states: Sequence[CapturedState]) -> Needs:
        """What restoring states takes."""
        pages = self._table.pages
        return Needs(0, 0 if pages is None else sum(pages.is_cut(state.position) for state in states))

    def capture(self, slots: Slots, progress: Sequence[CommittedProgress]) -> list[CapturedState]:
        """Capture the states of slots (none twice) that have nothing in flight, and of which `progress` was told.

        What it `needs` must be there.
        """
        states = [self._capture(slot, one) for slot, one in zip(slots.tolist(), progress, strict=True)]
        self._tell(self._table.write_line[slots], states)
        return states

    def leave(self, slot: int, position: int) -> CapturedState:
        """Hold what a slot will be at a position, on all spans in one line that their layers are to write: no tokens'
        pages are shared yet. A line must be there that may be frozen."""
        table, num_spans = self._table, self._table.ledger.num_spans
        (line,) = table.lines.allocate(1, zeroes=False).tolist()
        table.lines.freeze(line)
        read_line = np.full(num_spans, line)
        table.lines.hold(read_line[1:])
        nothing = np.zeros(num_spans, dtype=np.int64)
        progress, adapter = CommittedProgress(position, nothing, nothing, {}), table.adapters.of(slot)
        table.adapters.hold(adapter)
        state = CapturedState(read_line, nothing, NO_PAGES, progress, adapter)
        table.captured.add(state)
        return state

    def share_pages(self, left: Sequence[tuple[int, CapturedState]]) -> list[CapturedState]:
        """Let states that were left of slots hold the pages of their tokens, all of which the device has or was given;
        a page that is not full is copied behind that. Returns the states that take their places.

        Free pages for the copies must be there.
        """
        table, states = self._table, []
        if table.pages is None:
            return [state for _, state in left]
        copies: list[tuple[int, int]] = []
        for slot, state in left:
            pages, source = table.pages.share(int(table.write_line[slot]), state.position)
            if source:
                copies.append((source, int(pages[-1])))
            states.append(replace(state, pages=pages))
            table.captured.remove(state)
            table.captured.add(states[-1])
        if copies:
            rows = np.zeros((0, 0), dtype=np.int32)
            self._place(PagesPlaced(NO_SLOTS, rows, np.array(copies, dtype=np.int64).T))
        return states

    def restore(
        self, states: Sequence[CapturedState], count: int, principal: Principal, lease_s: float | None
    ) -> Opened:
        """Let `count` sequences of a principal begin from each state, those of the first one first.

        Their steps count from 1, and no reply is kept of them. What it `needs_of` them must be there. The adapter that
        is told is that of all, BASE where they differ. Raises RequestError as SequenceTable.check_room does, and
        INVALID_REQUEST for the lease; then nothing has changed.
        """
        table = self._table
        lease_s = table.checked_lease(lease_s)
        table.check_room(count * len(states), principal)
        lines = table.lines.allocate(count * len(states), zeroes=False)
        slots = table.begin(lines, lease_s, principal)
        for begin, state in zip(range(0, len(slots), count), states, strict=True):
            self._restore(slots[begin : begin + count], state)
        self._tell(lines, [state for state in states for _ in range(count)])
        adapters = {state.adapter for state in states}
        return Opened(table.handles(slots), lease_s, adapters.pop() if len(adapters) == 1 else BASE)

    def release(self, state: CapturedState) -> None:
        """Let go of a state: at once, or when nobody uses it any more. To be called once."""
        if state in self._uses:
            self.leaving.add(state)
            return
        table = self._table
        table.captured.remove(state)
        table.lines.release(state.read_line.tolist())
        if table.pages is not None:
            table.pages.drop(state.pages)
        table.adapters.give_back(state.adapter, 1)

    # -- states that come and go by other ways ---------------------------------------------------------------------

    @contextmanager
    def using(self, state: CapturedState) -> Iterator[None]:
        """Inside the context a state's lines and pages stay its own, whoever lets go of it."""
        self._uses[state] += 1
        try:
            yield
        finally:
            self._uses[state] -= 1
            if not self._uses[state]:
                del self._uses[state]
                if state in self.leaving:
                    self.leaving.remove(state)
                    self.release(state)

    def needs_of_stored(self, num_tokens: int) -> Needs:
        """What it takes to bring a state of so many tokens back."""
        pages = self._table.pages
        return Needs(1, 0 if pages is None else -(-num_tokens // pages.page_size))

    def bring(
        self,
        progress: CommittedProgress,
        has_begun: NDArray[np.bool_],
        draft_half: NDArray[np.int64],
        adapter: BoundAdapter,
    ) -> CapturedState:
        """A state whose line and pages are yet to be written. It is let go of when nobody uses it any more, unless it
        is taken out of `leaving` before. What it `needs_of_stored` must be there.

        has_begun bool [spans], draft_half int64 [spans], of each span. adapter: reserved for the state.
        """
        table = self._table
        read_line = np.full(len(has_begun), NULL_LINE, dtype=np.int64)
        if has_begun.any():
            (line,) = table.lines.allocate(1, zeroes=False).tolist()
            table.lines.freeze(line)
            read_line[has_begun] = line
            table.lines.hold(read_line[has_begun][1:])  # one reference is that of who wrote it
        pages = NO_PAGES if table.pages is None else table.pages.take(progress.position)
        state = CapturedState(read_line, draft_half, pages, progress, adapter)
        table.captured.add(state)
        self.leaving.add(state)
        return state

    def _capture(self, slot: int, progress: CommittedProgress) -> CapturedState:
        table = self._table
        line, read_line = int(table.write_line[slot]), table.read_line[:, slot].copy()
        new_line, num_own = line, int((read_line == line).sum())
        if num_own:
            table.lines.freeze(line)
            (new_line,) = table.lines.allocate(1, zeroes=False).tolist()
            table.write_line[slot] = new_line
            # The sequence reads it now; one reference it has, as who wrote it.
            table.lines.hold(np.full(num_own - 1, line))
            table.num_frozen_reads += num_own
        table.lines.hold(read_line)
        pages = NO_PAGES if table.pages is None else table.pages.capture(line, progress.position, new_line)
        adapter = table.adapters.of(slot)
        table.adapters.hold(adapter)
        state = CapturedState(read_line, table.draft_half[:, slot].copy(), pages, progress, adapter)
        table.captured.add(state)
        return state

    def _restore(self, slots: Slots, state: CapturedState) -> None:
        """Let sequences that have just begun in slots begin from a state."""
        table, count = self._table, len(slots)
        table.ledger.restore(slots, state.progress)
        table.read_line[:, slots] = state.read_line[:, None]
        table.draft_half[:, slots] = state.draft_half[:, None]
        table.lines.hold(state.read_line, count)
        table.num_frozen_reads += count * int(np.count_nonzero(state.read_line != NULL_LINE))
        table.adapters.hold(state.adapter, count)
        table.adapters.put(slots, state.adapter)
        if table.pages is not None:
            table.pages.restore(state.pages, state.position, table.write_line[slots])

    def _tell(self, lines: NDArray[np.int64], states: Sequence[CapturedState]) -> None:
        """Tell the device which pages lines have that go on behind states."""
        pages = self._table.pages
        if pages is not None and len(lines):
            self._place(pages.placed(lines, [(state.pages, state.position) for state in states]))
