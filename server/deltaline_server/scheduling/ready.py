"""The ready queue of a span: what could run now, in the order in which it will.

Short rows go at once, as many as a batch may have; when there are more, those first that have the fewest rows of their
principal ahead of them, which are of a higher priority, or of clients with fewer rows ahead. Long ones share a budget
of tokens: one principal after another, each for a quantum; of its rows the highest priority first, and within one
client after another, each for a quantum, so that many prefills of one do not starve a single one of another. Rows
whose adapter turns out not to be on the device when their turn comes are parked until their adapter has come
(adapter_wait.py), so that they hold up nobody. Taking costs what is taken, not what waits, unless more short rows wait
than a batch may have. Rows that were dropped meanwhile are skipped when their turn comes, unless rows of their request
wait: beside these they are taken as padding, like the rows that were never admitted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltaline_server.scheduling.adapters.batch_adapters import ABSENT, BatchAdapters
from deltaline_server.scheduling.pending import PendingStep, RowState
from deltaline_server.scheduling.scheduled_rows import ScheduledRows
from deltaline_server.step import WAYPOINT_TOKENS
from deltaline_server.tables.sequence_adapters import NO_ADAPTER

# Prefill chunks end on multiples of this many tokens, the chunk of the kernels, so that cutting moves no boundary of
# theirs, and no waypoint.
CHUNK_ALIGNMENT = WAYPOINT_TOKENS

# Rows (positions in the pending step), and how many of their tokens were taken before.
_ShortRows: TypeAlias = tuple[PendingStep, NDArray[np.int64], int]


@dataclass(eq=False)
class _LongRow:
    """A row (a position in its pending) that is not short. taken: its tokens in the batch that is being formed."""

    pending: PendingStep
    index: int
    taken: int = 0

    @property
    def left(self) -> int:
        return int(self.pending.length[self.index] - self.pending.cursor[self.index]) - self.taken

    @property
    def has_place(self) -> bool:
        """Whether it runs, or is padding beside rows that will."""
        return bool(self.pending.state[self.index] == RowState.WAITING) or self.pending.is_waiting


class _DeficitRoundRobin:
    """Long rows of one priority by client. The client in front has `_deficit` tokens left of its turn."""

    def __init__(self, quantum: int) -> None:
        self._quantum = self._deficit = quantum
        self._rows: dict[str, deque[_LongRow]] = {}
        self._turns: deque[str] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def add(self, row: _LongRow) -> None:
        client = row.pending.request.client
        if client not in self._rows:
            self._rows[client] = deque()
            self._turns.append(client)
        self._rows[client].append(row)

    def take(
        self, budget: int, max_short: int, most: int, chosen: list[_LongRow], has_adapter: Callable[[_LongRow], bool]
    ) -> int:
        """Take tokens of the rows whose turn it is, add the rows to `chosen`; return what is left of the budget.

        No more than `most` rows are chosen. has_adapter: whether the batch has a row's adapter; without it the row
        leaves.
        """
        while self._turns:
            rows = self._rows[self._turns[0]]
            row = rows[0]
            left = row.left if row.has_place else 0
            if left > max_short and (not _chunk(left, budget) or (len(chosen) == most and not row.taken)):
                break
            if left <= max_short or not (row.taken or has_adapter(row)):  # dropped, taken up to its end, or parked
                rows.popleft()
                if not rows:
                    del self._rows[self._turns.popleft()]
                    self._deficit = self._quantum
                continue
            chunk = _chunk(left, min(budget, self._deficit))
            if not chunk:  # its turn is over
                self._turns.rotate(-1)
                self._deficit = self._quantum
                continue
            if not row.taken:
                chosen.append(row)
            row.taken += chunk
            budget -= chunk
            self._deficit -= chunk
        return budget


class _LongRows:
    """Long rows by principal. The one in front has `_deficit` tokens left of its turn, if others wait."""

    def __init__(self, quantum: int) -> None:
        self._quantum = self._deficit = quantum
        self.rows: dict[int, dict[int, _DeficitRoundRobin]] = {}
        """Principals in the order of their turns; of each, the rows by priority. Empty where there are none."""

    def priority(self) -> int:
        """The highest priority of a row; there must be one."""
        return max(max(rows) for rows in self.rows.values())

    def add(self, row: _LongRow) -> None:
        rows = self.rows.setdefault(row.pending.request.principal.number, {})
        priority = row.pending.form.priority
        if priority not in rows:
            rows[priority] = _DeficitRoundRobin(self._quantum)
        rows[priority].add(row)

    def take(
        self, budget: int, max_short: int, most: int, chosen: list[_LongRow], has_adapter: Callable[[_LongRow], bool]
    ) -> None:
        """Take tokens of the principals whose turn it is, as _DeficitRoundRobin.take does of clients."""
        while self.rows:
            principal, rows = next(iter(self.rows.items()))
            is_alone = len(self.rows) == 1
            left = room = budget if is_alone else min(budget, self._deficit)
            for priority in sorted(rows, reverse=True):
                left = rows[priority].take(left, max_short, most, chosen, has_adapter)
                if not rows[priority]:
                    del rows[priority]
            budget -= room - left
            if not is_alone:  # what nobody waited for is no part of a turn
                self._deficit -= room - left
            if rows and (is_alone or left == budget):
                return  # it is the batch that is full, not the turn that is over
            del self.rows[principal]
            self._deficit = self._quantum  # no budget is larger, so that nobody's turn behind this one is in vain
            if rows:
                self.rows[principal] = rows


class ReadyQueue:
    """Rows of one span that may run now. A row is short when it has at most max_short tokens left.

    short, long: the rows, the short ones by priority, empty when there are none; they may hold rows that were dropped
    since.
    """

    def __init__(
        self, span: int, ready_spans: set[int], max_short: int, quantum: int, short_rows: int, long_rows: int
    ) -> None:
        """ready_spans: has the span, here and nowhere else, while rows of it are ready.

        quantum: tokens that a client's long rows get in its turn. short_rows, long_rows: of a batch, at most.
        """
        self._span, self._ready_spans = span, ready_spans
        self._max_short = max_short
        self._max_short_rows, self._max_long_rows = short_rows, long_rows
        self.short: dict[int, list[_ShortRows]] = {}
        self.long = _LongRows(quantum)
        self.num_short = self.num_parked = 0
        """Short rows that are ready, and parked rows, with those that were dropped since."""
        self.parked: dict[int, list[tuple[PendingStep, NDArray[np.int64]]]] = {}
        """Rows whose adapter was not there, by its number."""

    def priority(self) -> int:
        """The highest priority of a ready row; there must be one."""
        highest = [self.long.priority()] if self.long.rows else []
        return max((*self.short, *highest))

    def add(self, pending: PendingStep, index: NDArray[np.int64]) -> None:
        """Rows (positions in the pending step, in row order) of which no token was taken may run now."""
        if pending.longest > self._max_short:
            is_long = pending.length[index] > self._max_short
            for i in index[is_long].tolist():
                self._add_long(_LongRow(pending, i))
            index = index[~is_long]
        self._add_short(pending, index, 0)

    def wake(self, number: int) -> None:
        """The adapter of parked rows has come, or may have: they are ready again."""
        for pending, index in self.parked.pop(number, ()):
            self.num_parked -= len(index)
            cursor = int(pending.cursor[index[0]])
            if pending.length[index[0]] - cursor > self._max_short:
                self._add_long(_LongRow(pending, int(index[0])))
            else:
                self._add_short(pending, index, cursor)

    def still_waits(self, number: int) -> bool:
        """Whether rows are parked for an adapter; those that were dropped meanwhile are forgotten."""
        if not any(pending.has_failures for pending, _ in self.parked.get(number, ())):
            return number in self.parked
        parked = self.parked.pop(number)
        waiting = [(pending, index) for pending, index in parked if RowState.WAITING in pending.state[index].tobytes()]
        self.num_parked -= sum(len(index) for _, index in parked) - sum(len(index) for _, index in waiting)
        if waiting:
            self.parked[number] = waiting
        return bool(waiting)

    def take(
        self, budget: int, adapters: BatchAdapters | None = None
    ) -> tuple[list[ScheduledRows], list[ScheduledRows]]:
        """The next batch's short rows, and its long rows with at most `budget` tokens together.

        Short rows that are taken leave, and so do long ones with all their tokens. What is left of one may run when
        its tokens were taken: the caller moves the cursor before it asks again. adapters: the batch's, None while no
        row has any.
        """
        short, long = self._take_short(adapters), self._take_long(budget, adapters) if self.long.rows else []
        if not (self.short or self.long.rows):
            self._ready_spans.discard(self._span)
        return short, long

    def _take_short(self, adapters: BatchAdapters | None) -> list[ScheduledRows]:
        ordered: list[_ShortRows] = []
        for priority in sorted(self.short, reverse=True):
            ordered += self.short[priority]
        scheduled, room = [], self._max_short_rows
        if self.num_short > room:
            ordered = _fairly(ordered)
        self.short, self.num_short = {}, 0
        for pending, taken, cursor in ordered:
            if pending.has_padding and not pending.is_waiting:
                continue
            if pending.adapters is not None and room:
                taken = self._with_adapter(pending, taken, adapters)
            if len(taken) > room:
                self._add_short(pending, taken[room:], cursor)
                taken = taken[:room]
            if len(taken):
                all_rows = not (cursor or pending.has_padding) and len(taken) == len(pending.length)
                lengths = pending.length if all_rows else pending.length[taken] - cursor
                scheduled.append(ScheduledRows(pending, taken, lengths, cursor, True))
                room -= len(taken)
        return scheduled

    def _take_long(self, budget: int, adapters: BatchAdapters | None) -> list[ScheduledRows]:
        def has_adapter(row: _LongRow) -> bool:
            return (
                row.pending.adapters is None
                or len(self._with_adapter(row.pending, np.array([row.index]), adapters)) > 0
            )

        chosen: list[_LongRow] = []
        self.long.take(budget, self._max_short, self._max_long_rows, chosen, has_adapter)
        scheduled = []
        for row in chosen:
            left, taken, row.taken = row.left, row.taken, 0
            index, cursor = np.array([row.index]), int(row.pending.cursor[row.index])
            scheduled.append(ScheduledRows(row.pending, index, np.array([taken]), cursor, left == 0))
            if 0 < left <= self._max_short:
                self._add_short(row.pending, index, cursor + taken)
        return scheduled

    def _with_adapter(
        self, pending: PendingStep, index: NDArray[np.int64], adapters: BatchAdapters | None
    ) -> NDArray[np.int64]:
        """Park the rows whose adapter the batch can't have; return the others. All are short, or it is a single one."""
        assert pending.adapters is not None
        if adapters is None:  # no sequence has one any more: the rows that are left have none
            return index
        numbers = pending.adapters[index]
        if pending.has_padding:
            numbers[pending.state[index] != RowState.WAITING] = NO_ADAPTER
        is_absent = adapters.places_of(numbers) == ABSENT
        if not np.count_nonzero(is_absent):
            return index
        for number in np.unique(numbers[is_absent]).tolist():
            rows = index[numbers == number]
            self.parked.setdefault(number, []).append((pending, rows))
            self.num_parked += len(rows)
        present: NDArray[np.int64] = index[~is_absent]
        return present

    def _add_short(self, pending: PendingStep, index: NDArray[np.int64], cursor: int) -> None:
        if len(index):
            self.short.setdefault(pending.form.priority, []).append((pending, index, cursor))
            self.num_short += len(index)
            self._ready_spans.add(self._span)

    def _add_long(self, row: _LongRow) -> None:
        self.long.add(row)
        self._ready_spans.add(self._span)


def _fairly(ordered: list[_ShortRows]) -> list[_ShortRows]:
    """More rows than a batch takes, in the order in which they should go; `ordered`: by priority, then as they came."""
    ahead: defaultdict[object, int] = defaultdict(int)
    of_principals: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for place, (pending, index, _) in enumerate(ordered):
        request, priority = pending.request, pending.form.priority
        client = request.principal.number, priority, request.client
        of_principals[request.principal.number].append((-priority, ahead[client], place))
        ahead[client] += len(index)
    fair: list[tuple[int, int]] = []
    for turns in of_principals.values():
        turns.sort()
        num_ahead = 0
        for _, _, place in turns:
            fair.append((num_ahead, place))
            num_ahead += len(ordered[place][1])
    fair.sort()
    return [ordered[place] for _, place in fair]


def _chunk(left: int, budget: int) -> int:
    """Tokens that a row with `left` tokens takes of a budget."""
    return left if left <= budget else budget - budget % CHUNK_ALIGNMENT
