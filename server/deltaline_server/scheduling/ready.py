"""Ready rows: what a span could run now, in the order in which it will.

Short rows go at once, as many as a batch may have. Long ones share a budget of tokens: the highest priority first, and
within a priority one client after another, each for a quantum of tokens, so that many prefills of one do not starve a
single one of another. Rows whose adapter turns out not to be on the device when their turn comes are parked until
somebody wakes them (adapter_wait.py), so that they hold up nobody. Knows rows that may run; not why the others may not
(queue.py). Taking costs what is taken, not what waits: rows that were dropped meanwhile are skipped when their turn
comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltaline_server.scheduling.batch_adapters import ABSENT, BatchAdapters
from deltaline_server.scheduling.pending import Job, RowState
from deltaline_server.scheduling.scheduled_rows import Piece

# Prefill chunks end on multiples of this many tokens, the chunk of the kernels, so that cutting moves no boundary of
# theirs.
CHUNK_ALIGNMENT = 64


@dataclass(eq=False)
class _LongRow:
    """A row (a position in its job) that is not short. taken: its tokens in the batch that is being formed."""

    job: Job
    index: int
    taken: int = 0

    @property
    def left(self) -> int:
        return int(self.job.length[self.index] - self.job.cursor[self.index]) - self.taken

    @property
    def is_waiting(self) -> bool:
        return bool(self.job.state[self.index] == RowState.WAITING)


class _Rounds:
    """Long rows of one priority by client. The client in front has `_credit` tokens left of its turn."""

    def __init__(self, quantum: int) -> None:
        self._quantum = self._credit = quantum
        self._rows: dict[str, deque[_LongRow]] = {}
        self._turns: deque[str] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def add(self, row: _LongRow) -> None:
        client = row.job.request.client
        if client not in self._rows:
            self._rows[client] = deque()
            self._turns.append(client)
        self._rows[client].append(row)

    def take(
        self, budget: int, max_short: int, most: int, chosen: list[_LongRow], boards: Callable[[_LongRow], bool]
    ) -> int:
        """Take tokens of the rows whose turn it is, add the rows to `chosen`; return what is left of the budget.

        No more than `most` rows are chosen. boards: whether the batch has a row's adapter; without it the row leaves.
        """
        while self._turns:
            rows = self._rows[self._turns[0]]
            row = rows[0]
            left = row.left if row.is_waiting else 0
            if left > max_short and (not _chunk(left, budget) or (len(chosen) == most and not row.taken)):
                break
            if left <= max_short or not (row.taken or boards(row)):  # dropped, taken up to its end, or parked
                rows.popleft()
                if not rows:
                    del self._rows[self._turns.popleft()]
                    self._credit = self._quantum
                continue
            chunk = _chunk(left, min(budget, self._credit))
            if not chunk:  # its turn is over
                self._turns.rotate(-1)
                self._credit = self._quantum
                continue
            if not row.taken:
                chosen.append(row)
            row.taken += chunk
            budget -= chunk
            self._credit -= chunk
        return budget


class ReadyRows:
    """Rows of one span that may run now. A row is short when it has at most max_short tokens left."""

    def __init__(self, max_short: int, quantum: int, short_rows: int, long_rows: int) -> None:
        """quantum: tokens that a client's long rows get in its turn. short_rows, long_rows: of a batch, at most."""
        self._max_short, self._quantum = max_short, quantum
        self._short_rows, self._long_rows = short_rows, long_rows
        self._short: dict[int, list[tuple[Job, NDArray[np.int64], int]]] = {}
        self._long: dict[int, _Rounds] = {}
        self.num_short = self.num_parked = 0
        """Short rows that are ready, and parked rows, with those that were dropped since."""
        self.parked: dict[int, list[tuple[Job, NDArray[np.int64]]]] = {}
        """Rows whose adapter was not there, by its number."""

    @property
    def priority(self) -> int | None:
        """The highest priority of a ready row, None when there is none."""
        if not self._short and not self._long:
            return None
        return max((*self._short, *self._long))

    @property
    def has_long(self) -> bool:
        """Whether a long row is ready, or was and is dropped since."""
        return bool(self._long)

    def add(self, job: Job, index: NDArray[np.int64]) -> None:
        """Rows (positions in the job's admission) of which no token was taken may run now."""
        if job.longest > self._max_short:
            is_long = job.length[index] > self._max_short
            for i in index[is_long].tolist():
                self._add_long(_LongRow(job, i))
            index = index[~is_long]
        self._add_short(job, index, 0)

    def wake(self, number: int) -> None:
        """The adapter of parked rows has come, or may have: they are ready again."""
        for job, index in self.parked.pop(number, ()):
            self.num_parked -= len(index)
            cursor = int(job.cursor[index[0]])
            if job.length[index[0]] - cursor > self._max_short:
                self._add_long(_LongRow(job, int(index[0])))
            else:
                self._add_short(job, index, cursor)

    def still_waits(self, number: int) -> bool:
        """Whether rows are parked for an adapter; those that were dropped meanwhile are forgotten."""
        if not any(job.is_marred for job, _ in self.parked.get(number, ())):
            return number in self.parked
        parked = self.parked.pop(number)
        waiting = [(job, index[job.state[index] == RowState.WAITING]) for job, index in parked]
        waiting = [(job, index) for job, index in waiting if len(index)]
        self.num_parked -= sum(len(index) for _, index in parked) - sum(len(index) for _, index in waiting)
        if waiting:
            self.parked[number] = waiting
        return bool(waiting)

    def take(self, budget: int, adapters: BatchAdapters | None = None) -> tuple[list[Piece], list[Piece]]:
        """The next batch's short rows, and its long rows with at most `budget` tokens together.

        Short rows that are taken leave, and so do long ones with all their tokens. What is left of one may run when its
        piece was taken: the caller moves the cursor before it asks again. adapters: the batch's, None while no row has
        any.
        """
        return self._take_short(adapters), self._take_long(budget, adapters) if self._long else []

    def _take_short(self, adapters: BatchAdapters | None) -> list[Piece]:
        short, self._short, self.num_short = self._short, {}, 0
        pieces, room = [], self._short_rows
        for priority in sorted(short, reverse=True):
            for job, index, cursor in short[priority]:
                waiting = index[job.state[index] == RowState.WAITING] if job.is_marred else index
                if job.adapters is not None and room and len(waiting):
                    waiting = self._board(job, waiting, adapters)
                if len(waiting) > room:
                    self._add_short(job, waiting[room:], cursor)
                    waiting = waiting[:room]
                if len(waiting):
                    all_rows = not cursor and len(waiting) == len(job.length)
                    lengths = job.length if all_rows else job.length[waiting] - cursor
                    pieces.append(Piece(job, waiting, lengths, cursor, True))
                    room -= len(waiting)
        return pieces

    def _take_long(self, budget: int, adapters: BatchAdapters | None) -> list[Piece]:
        def boards(row: _LongRow) -> bool:
            return row.job.adapters is None or len(self._board(row.job, np.array([row.index]), adapters)) > 0

        chosen: list[_LongRow] = []
        for priority in sorted(self._long, reverse=True):
            budget = self._long[priority].take(budget, self._max_short, self._long_rows, chosen, boards)
            if not self._long[priority]:
                del self._long[priority]
        pieces = []
        for row in chosen:
            left, taken, row.taken = row.left, row.taken, 0
            index, cursor = np.array([row.index]), int(row.job.cursor[row.index])
            pieces.append(Piece(row.job, index, np.array([taken]), cursor, left == 0))
            if 0 < left <= self._max_short:
                self._add_short(row.job, index, cursor + taken)
        return pieces

    def _board(self, job: Job, index: NDArray[np.int64], adapters: BatchAdapters | None) -> NDArray[np.int64]:
        """Park the rows whose adapter the batch can't have; return the others. All are short, or it is a single one."""
        assert job.adapters is not None and adapters is not None  # a row in flight keeps its sequence's adapter bound
        numbers = job.adapters[index]
        is_absent = adapters.slots_of(numbers) == ABSENT
        if not np.count_nonzero(is_absent):
            return index
        for number in np.unique(numbers[is_absent]).tolist():
            rows = index[numbers == number]
            self.parked.setdefault(number, []).append((job, rows))
            self.num_parked += len(rows)
        present: NDArray[np.int64] = index[~is_absent]
        return present

    def _add_short(self, job: Job, index: NDArray[np.int64], cursor: int) -> None:
        if len(index):
            self._short.setdefault(job.form.priority, []).append((job, index, cursor))
            self.num_short += len(index)

    def _add_long(self, row: _LongRow) -> None:
        priority = row.job.form.priority
        if priority not in self._long:
            self._long[priority] = _Rounds(self._quantum)
        self._long[priority].add(row)


def _chunk(left: int, budget: int) -> int:
    """Tokens that a row with `left` tokens takes of a budget."""
    return left if left <= budget else budget - budget % CHUNK_ALIGNMENT
