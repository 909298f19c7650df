"""A job: one step request in the queue, from admission to its result.

Knows its rows' chunks and outputs; not other jobs' order (scheduler.py), nor steps' rules (ledger.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltaline_server.admission import Admission
from deltaline_server.errors import Refusal
from deltaline_server.replies import KeptReply
from deltaline_server.step import OutputRows, RowOutcome, StepRequest, StepResult, StepTiming


class RowState:
    """Where an admitted row is. Plain integers: enum members are slow to reach, and these are for arrays."""

    WAITING: Final = 0
    RUNNING: Final = 1
    DONE: Final = 2
    REFUSED: Final = 3


@dataclass(frozen=True)
class Join:
    """A row whose step is in flight in another job: it takes that job's outcome."""

    row: int
    source: Job
    source_row: int


class Job:
    """Admitted rows of a request with their cursors, and the reply being put together.

    Arrays named after admitted rows are indexed by the position in `admission`; `outcome`, `position` and
    `output_start` by the request's rows.
    """

    def __init__(
        self,
        request: StepRequest,
        admission: Admission,
        reserved_bytes: NDArray[np.int64],
        number: int,
        arrival_s: float,
    ) -> None:
        self.request, self.admission = request, admission
        self.number, self.arrival_s = number, arrival_s
        self.future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        rows = admission.rows
        self.kind = request.kind[rows]
        self.length = request.lengths[rows]
        self.begin = request.query_start_loc[rows]
        self.cursor = np.zeros(len(rows), dtype=np.int64)
        self.state = np.full(len(rows), RowState.WAITING, dtype=np.uint8)
        self.num_unfinished = len(rows)
        self.is_finished = False
        self.reserved_bytes = reserved_bytes
        self.outcome = np.full(request.num_rows, RowOutcome.REFUSED, dtype=np.uint8)
        self.outcome[rows] = RowOutcome.EXECUTED
        self.position = np.zeros(request.num_rows, dtype=np.int64)
        self.position[rows] = admission.position
        self.refusals: dict[int, Refusal] = {}
        self.joins: list[Join] = []
        self.timing = StepTiming()
        self.output_start = np.zeros(request.num_rows + 1, dtype=np.int64)
        self._outputs: NDArray[Any] | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Jobs run in this order: higher priority first, then the one that came first."""
        return -self.request.priority, self.number

    @property
    def can_finish(self) -> bool:
        """Whether every row is done or refused, here and where it joined."""
        return self.num_unfinished == 0 and all(join.source.is_finished for join in self.joins)

    def lay_out_outputs(self, rows: NDArray[np.int64]) -> None:
        """Give each of these request rows its place in the reply.

        In memory of the client's every row has one: kept replies lie there, so the same step sent again must find and
        leave each where it was, whatever is refused this time.
        """
        counts = np.zeros(self.request.num_rows, dtype=np.int64)
        if self.request.output_memory is not None:
            rows = np.arange(self.request.num_rows)
        counts[rows] = self.request.output_counts[rows]
        np.cumsum(counts, out=self.output_start[1:])

    @property
    def outputs(self) -> NDArray[Any]:
        """Outputs [rows, hidden] of the reply, in row order; rows that are not done are undefined."""
        if self._outputs is None:
            shape = (int(self.output_start[-1]), self.request.hidden.shape[1])
            given, dtype = self.request.output_memory, self.request.hidden.dtype
            self._outputs = np.empty(shape, dtype) if given is None else given.memory.view(dtype).reshape(shape)
        return self._outputs

    def put_outputs(self, places: NDArray[np.int64] | slice, values: NDArray[Any]) -> None:
        """Put outputs of a batch at their places. A batch of nothing but these outputs is taken over without a copy."""
        is_whole_batch = values.base is None or values.base.nbytes == values.nbytes
        is_whole_reply = isinstance(places, slice) and places == slice(0, int(self.output_start[-1]))
        if self._outputs is None and self.request.output_memory is None and is_whole_batch and is_whole_reply:
            self._outputs = values
        else:
            self.outputs[places] = values

    def output_places(self, index: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64] | slice:
        """Where the outputs of a chunk of admitted rows go; to be asked before their cursors move."""
        starts = self.output_start[self.admission.rows[index]]
        if self.request.output is OutputRows.ALL:
            return token_range(starts + self.cursor[index], lengths)
        if self.request.output is OutputRows.LAST:
            ends = self.cursor[index] + lengths == self.length[index]
            return token_range(starts[ends], np.ones(int(ends.sum()), dtype=np.int64))
        return slice(0, 0)

    def output_of(self, row: int) -> NDArray[Any]:
        """Outputs of one request row, a view."""
        return self.outputs[self.output_start[row] : self.output_start[row + 1]]

    def refuse(self, index: int, refusal: Refusal) -> None:
        """An admitted row does not run after all, or its computation failed."""
        row = int(self.admission.rows[index])
        self.state[index] = RowState.REFUSED
        self.num_unfinished -= 1
        self.set_refusal(row, refusal)

    def set_refusal(self, row: int, refusal: Refusal) -> None:
        self.outcome[row] = RowOutcome.REFUSED
        self.position[row] = int(refusal.metadata.get("position", 0))
        self.refusals[row] = refusal

    def replay(self, row: int, reply: KeptReply) -> None:
        """A request row has a kept reply."""
        self.outcome[row], self.position[row] = RowOutcome.REPLAYED, reply.position
        place = self.output_of(row)
        if place.ctypes.data != reply.hidden.ctypes.data:  # else it lies there already, in memory of the client's
            place[:] = reply.hidden

    def is_waiting(self, index: int) -> bool:
        """Whether an admitted row waits for its next batch."""
        return bool(self.state[index] == RowState.WAITING)

    def not_begun(self) -> NDArray[np.int64]:
        """Admitted rows (positions) that wait for their first chunk."""
        return np.flatnonzero((self.state == RowState.WAITING) & (self.cursor == 0))

    def finish(self) -> None:
        """Take over the joined rows' outcomes and complete the future, unless its caller has gone. Idempotent."""
        if self.is_finished:
            return
        self.is_finished = True
        for join in self.joins:
            source = join.source
            refusal = source.refusals.get(join.source_row)
            if refusal is not None:
                self.set_refusal(join.row, refusal)
                continue
            self.outcome[join.row] = RowOutcome.JOINED
            self.position[join.row] = source.position[join.source_row]
            place, outputs = self.output_of(join.row), source.output_of(join.source_row)
            if place.ctypes.data != outputs.ctypes.data:
                place[:] = outputs
        if not self.future.done():
            self.future.set_result(self._result())

    def _result(self) -> StepResult:
        refused = self.outcome == RowOutcome.REFUSED
        counts = np.diff(self.output_start)
        outputs, start = self.outputs, self.output_start
        if (
            self.request.output_memory is None and counts[refused].any()
        ):  # rows that were refused after they had been given a place
            outputs = outputs[np.repeat(~refused, counts)]
            start = np.concatenate(([0], np.cumsum(np.where(refused, 0, counts))))
        return StepResult(
            self.outcome,
            self.position,
            start,
            outputs,
            dict(sorted(self.refusals.items())),
            self.timing if self.timing.batch_rows else None,
            self.request.output_memory,
        )


def token_range(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Indices of tokens start .. start + length - 1 of each row: a slice when they are contiguous, else int64 [sum]."""
    if len(starts) == 0:
        return slice(0, 0)
    ends = starts + lengths
    if (starts[1:] == ends[:-1]).all():
        return slice(int(starts[0]), int(ends[-1]))
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
