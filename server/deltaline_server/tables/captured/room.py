"""Which snapshots give way when lines or pages are short: those that it costs least to lose, and none in vain
where lines are short or pages are; where both are, one may go for lines that another frees with its pages.

The work is a few operations on arrays, whatever is asked for, beside what each snapshot takes that gives way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.tables.captured.capture import Capture, Needs
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.lines import NULL_LINE, LinePool
from deltaline_server.tables.prefixes.eviction import Eviction

Places = NDArray[np.int64]


class Room:
    """The unpinned snapshots' lines and pages, as far as nobody else holds them. All methods belong to one thread.

    A snapshot has its place in the Eviction that tells what it is worth. Whoever holds a page holds those before it in
    the same order, so that nobody holds any page alone but the last ones of a state.
    """

    def __init__(self, eviction: Eviction, lines: LinePool, capture: Capture, num_spans: int) -> None:
        self._eviction, self._capture = eviction, capture
        self._lines, self._pages = lines, lines.pages
        num_places = eviction.num_places
        self._states: list[CapturedState | None] = [None] * num_places
        self._read_line = np.zeros((num_places, num_spans), dtype=np.int64)
        self._last_page = np.zeros(num_places, dtype=np.int64)
        # How many unpinned snapshots hold each page.
        self._holders = np.zeros(1 if self._pages is None else self._pages.num_pages + 1, dtype=np.int64)

    def add(self, snapshot: bytes, state: CapturedState) -> None:
        """A snapshot may give way from now on. It is in the Eviction, and was not added before."""
        place = self._eviction.place_of(snapshot)
        self._states[place], self._read_line[place] = state, state.read_line
        self._last_page[place] = state.pages[-1] if len(state.pages) else 0
        self._holders[state.pages] += 1

    def remove(self, snapshot: bytes) -> None:
        """A snapshot is no more, or may not give way; it is in the Eviction still. Idempotent."""
        place = self._eviction.place_of(snapshot)
        state, self._states[place] = self._states[place], None
        if state is not None:
            self._read_line[place], self._last_page[place] = NULL_LINE, 0
            self._holders[state.pages] -= 1

    def num_pages(self, kept: Collection[bytes] = ()) -> int:
        """Pages that are free when all have given way but those that are kept."""
        if self._pages is None:
            return 0
        holders = self._holders
        if kept:
            holders = holders.copy()
            for snapshot in kept:
                state = self._states[self._eviction.place_of(snapshot)]
                if state is not None:
                    holders[state.pages] -= 1
        return int(np.count_nonzero((holders > 0) & (holders == self._pages.references())))

    def line_holders(self) -> NDArray[np.int64]:
        """How often the snapshots that may give way hold each line, int64 [lines + 1]."""
        return np.bincount(self._read_line.ravel(), minlength=self._lines.num_lines + 1)

    def victims(self, short: Needs, count: int, busy: Slots, kept: Collection[bytes] = ()) -> list[bytes]:
        """The snapshots whose end gives what is short, `count` at least, none of those that are kept.

        busy: slots whose lines are not given back by Capture.thaw. Changes nothing. Raises RequestError
        NO_SNAPSHOT_LINES or PAGES_EXHAUSTED where all together would not do.
        """
        if short.lines <= 0 and short.pages <= 0 and count <= 0:
            return []
        costs = self._costs(kept, by_size=False)
        places = np.flatnonzero(np.isfinite(costs))
        holders = self._capture.line_holders(busy)
        self._check(short, count, places, len(self._freed_lines(places, holders)), kept)
        gone = places[:0]
        if short.pages > 0:  # they free lines as well
            gone = self._for_pages(short.pages, places, self._costs(kept, by_size=True))
        if (num_lines := short.lines - len(self._freed_lines(gone, holders))) > 0:
            left = holders - np.bincount(self._read_line[gone].ravel(), minlength=len(holders))
            others = places[~np.isin(places, gone)]
            gone = np.concatenate((gone, self._for_lines(num_lines, others, costs, left)))
        if count > len(gone):
            others = places[~np.isin(places, gone)]
            gone = np.concatenate((gone, others[np.argsort(costs[others], kind="stable")[: count - len(gone)]]))
        return [self._eviction.snapshot_at(place) for place in gone.tolist()]

    def check_integrity(self, states: Mapping[bytes, CapturedState]) -> None:
        """Raise ValueError unless it is these states that may give way."""
        here = {id(state): place for place, state in enumerate(self._states) if state is not None}
        expected = {id(state): self._eviction.place_of(snapshot) for snapshot, state in states.items()}
        holders = np.zeros_like(self._holders)
        for state in states.values():
            holders[state.pages] += 1
        if here != expected or (holders != self._holders).any():
            raise ValueError("room: what may give way and what is counted disagree")

    def _costs(self, kept: Collection[bytes], *, by_size: bool) -> NDArray[np.float64]:
        costs = self._eviction.costs(by_size=by_size)
        costs[[self._eviction.place_of(snapshot) for snapshot in kept]] = np.inf
        return costs

    def _check(self, short: Needs, count: int, places: Places, num_lines: int, kept: Collection[bytes]) -> None:
        """Raise RequestError where the snapshots at places, which hold num_lines alone, would not do."""
        lines = self._lines
        if short.lines > num_lines:
            asked, of = short.lines + lines.num_freezable, lines.snapshot_lines
            can_be_had = f"{asked} lines asked for, {lines.num_freezable + num_lines} of {of} for snapshots can be had"
            if asked > of:
                message = f"{can_be_had}: --snapshot-lines is how many there are"
                raise RequestError(Reason.NO_SNAPSHOT_LINES, message)
            message = f"{can_be_had}; the others are pinned, or sequences have yet to step on"
            raise RequestError(Reason.NO_SNAPSHOT_LINES, message, retry_after_s=1.0)
        if count > len(places):
            message = f"{len(places)} of {self._eviction.num_places} snapshots may give way, {count} have to"
            raise RequestError(Reason.NO_SNAPSHOT_LINES, message, retry_after_s=1.0)
        if short.pages > 0 and short.pages > (num_pages := self.num_pages(kept)):
            message = f"{short.pages} pages are lacking, {num_pages} can be had from snapshots"
            raise RequestError(Reason.PAGES_EXHAUSTED, message, retry_after_s=0.05)

    def _freed_lines(self, places: Places, holders: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lines that nobody holds but the snapshots at places; holders int64 [lines]: how many hold each."""
        here = np.bincount(self._read_line[places].ravel(), minlength=len(holders))
        return np.flatnonzero((here > 0) & (here == holders))

    def _for_lines(self, count: int, places: Places, costs: NDArray[np.float64], holders: NDArray[np.int64]) -> Places:
        """Those of `places` that hold the `count` lines which it costs least to free."""
        read_line, free = self._read_line[places], self._freed_lines(places, holders)
        weights = np.repeat(costs[places], read_line.shape[1])
        cost = np.bincount(read_line.ravel(), weights=weights, minlength=len(holders))[free]
        chosen = free[np.argsort(cost, kind="stable")[:count]]
        victims: Places = places[np.isin(read_line, chosen).any(axis=1)]
        return victims

    def _for_pages(self, count: int, places: Places, costs: NDArray[np.float64]) -> Places:
        """Those of `places` whose end frees `count` pages."""
        assert self._pages is not None
        holders, num_freed, groups = self._pages.references(), 0, list[Places]()
        while num_freed < count:
            # Alike states share all their pages, and free those that are theirs alone when all of them go.
            last, group, size = np.unique(self._last_page[places], return_inverse=True, return_counts=True)
            ripe = np.flatnonzero((holders[last] == size) & (last > 0))
            cost = np.bincount(group, weights=costs[places])[ripe]
            # What is behind those that go is to be looked at before those that cost much more.
            ripe = ripe[np.argsort(cost, kind="stable")[: 1 + len(ripe) // 8]]
            assert len(ripe), "nobody holds the last page of some state alone"
            for i in ripe.tolist():
                groups.append(places[group == i])
                num_freed += self._drop(holders, int(groups[-1][0]), size[i])
                if num_freed >= count:
                    break
            places = places[~np.isin(places, np.concatenate(groups))]
        return self._without_vain(groups, holders, num_freed - count)

    def _without_vain(self, groups: list[Places], holders: NDArray[np.int64], surplus: int) -> Places:
        """Of groups of alike states, in the order in which they would go, those that have to; surplus: pages that are
        freed beside those that are needed. What a state has is a part of what was behind it, which stays with it."""
        left = []
        for group in reversed(groups):
            num_pages = -self._drop(holders, int(group[0]), -len(group))
            if num_pages <= surplus:
                surplus -= num_pages
            else:
                self._drop(holders, int(group[0]), len(group))
                left.append(group)
        return np.concatenate(left)

    def _drop(self, holders: NDArray[np.int64], place: int, count: int) -> int:
        """Count so many holders fewer of the pages of the state at a place; returns how many pages that frees. A count
        below 0 takes it back."""
        state = self._states[place]
        if state is None or not len(state.pages):
            return 0
        before = holders[state.pages]
        holders[state.pages] = after = before - count
        return int(np.count_nonzero(after == 0)) - int(np.count_nonzero(before == 0))
