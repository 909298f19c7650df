"""A pending step: a request with its rows admitted, until its result is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Refusal
from deltaline_server.scheduling.use import Use
from deltaline_server.step import LeftWaypoint, RowKind, RowOutcome, StepRequest, StepResult, StepTiming, count_kinds
from deltaline_server.tables.kept_replies import KeptReply
from deltaline_server.tables.ledger import Admission


class RowState:
    """Where a row is. Plain integers: enum members are slow to reach, and these are for arrays.

    WAITING: it has tokens that no batch has taken. RUNNING: all of them are taken, some are in flight. DISCARDED: its
    state can't be trusted, and it is refused once nothing of its sequence is in flight. PADDING: it was not admitted.
    """

    WAITING: Final = 0
    RUNNING: Final = 1
    DISCARDED: Final = 2
    DONE: Final = 3
    REFUSED: Final = 4
    PADDING: Final = 5


NO_ROWS = np.zeros(0, dtype=np.int64)
_NONE_LEFT: Mapping[int, list[LeftWaypoint]] = {}


@dataclass(frozen=True)
class Join:
    """A row whose step is in flight in another request: it takes that one's outcome."""

    row: int
    source: PendingStep
    source_row: int


class PendingStep:
    """A request's rows with their cursors, and the reply being put together.

    `rows` are the request's rows, the admitted ones first, as in `admission`; `kind`, `length`, `begin`, `cursor` and
    `state` are indexed by positions there, `outcome`, `position` and `output_start` by the request's rows. cursor:
    tokens that batches have taken, in flight or done.

    A row that does not run keeps its place as padding in the batches of those that do, so that a row's bits don't
    depend on what becomes of the others.
    """

    def __init__(
        self,
        request: StepRequest,
        admission: Admission,
        joins: list[Join],
        refusals: dict[int, Refusal],
        kept: dict[int, KeptReply],
    ) -> None:
        """joins, refusals and kept (replies of earlier calls, by row): of the rows that were not admitted."""
        form = request.form
        self.request, self.form, self.span, self.admission = request, form, form.span, admission
        self.joins, self.refusals = joins, refusals
        rows = admission.rows
        self.rows, num_rows = rows, len(rows)
        self.is_whole = num_rows == form.num_rows
        """Whether every row of the request was admitted, so that positions in the admission are its rows."""
        self.position: NDArray[np.int64]
        self.begin: NDArray[np.int64]
        self.num_of_kind: Mapping[RowKind, int]
        self.output_start: NDArray[np.int64]
        if self.is_whole:
            self.kind, self.length, self.begin = form.kind, form.lengths, form.query_start_loc[:-1]
            self.num_of_kind, self.longest = form.num_of_kind, form.longest
            self.reserved_bytes = form.kept_bytes
            self.outcome = np.full(num_rows, RowOutcome.EXECUTED.value, dtype=np.uint8)
            self.position, self.output_start = admission.after[1].copy(), form.output_start
        else:
            is_admitted = np.zeros(form.num_rows, dtype=np.bool_)
            is_admitted[rows] = True
            self.rows = np.concatenate((rows, np.flatnonzero(~is_admitted)))
            self.kind, self.length = form.kind[self.rows], form.lengths[self.rows]
            self.num_of_kind = count_kinds(self.kind[:num_rows])
            self.begin, self.longest = form.query_start_loc[self.rows], form.longest
            self.reserved_bytes = form.kept_bytes[rows]
            self.outcome = np.full(form.num_rows, RowOutcome.REFUSED.value, dtype=np.uint8)
            self.outcome[rows] = RowOutcome.EXECUTED
            self.position = np.zeros(form.num_rows, dtype=np.int64)
            self.position[rows] = admission.after[1]
            self._lay_out_outputs([*rows.tolist(), *kept, *(join.row for join in joins)])
        self.cursor = np.zeros(form.num_rows, dtype=np.int64)
        self.state = np.zeros(form.num_rows, dtype=np.uint8)
        self.state[num_rows:] = RowState.PADDING
        self.padding = NO_ROWS if self.is_whole else np.arange(num_rows, form.num_rows)
        """Positions of the rows that were not admitted, until they have got their places in the queue."""
        self.num_unfinished, self.num_done = num_rows, 0
        self.is_finished = self.has_failures = False
        """has_failures: whether a row was discarded or refused, so that states must be looked at one by one."""
        self.has_padding = not self.is_whole
        """Whether a row does not run, or not any more, and keeps its place as padding."""
        self.number, self.arrival_s = 0, 0.0
        """Its name in the queue, and when it came to it, on the scheduler's clock."""
        self.on_done: Callable[[StepResult], None]
        """Called once, with the whole result."""
        self.reply_turns: int
        """Turns of the event loop from there until the reply has left, 1 or more."""
        self.use: Use
        """Of the principal, in which it counts."""
        self.adapters: NDArray[np.int64] | None = None
        """Numbers of the rows' adapters, None when none has one; padding has none."""
        self.joiners: list[PendingStep] = []
        """Those that wait for this one."""
        self.timing = StepTiming()
        self.left = {row: list[LeftWaypoint]() for row in form.waypoints} if form.waypoints else _NONE_LEFT
        """What became of waypoints, by request row; empty where there are none."""
        self.ends: set[int] = set()
        """Request rows behind which a state is yet to be left: each counts as unfinished once more."""
        self._outputs: NDArray[Any] | None = None
        for row, refusal in refusals.items():
            self._set_refusal(row, refusal)
        for row, reply in kept.items():
            self._replay(row, reply)

    @property
    def can_finish(self) -> bool:
        """Whether every row is done or refused, here and where it joined."""
        return not self.num_unfinished and (not self.joins or all(join.source.is_finished for join in self.joins))

    @property
    def is_waiting(self) -> bool:
        """Whether a row has tokens that no batch has taken, so that the others keep their places."""
        return RowState.WAITING in self.state.tobytes()

    @property
    def outputs(self) -> NDArray[Any]:
        """Outputs [rows, width] of the reply, in row order; rows that are not done are undefined."""
        if self._outputs is None:
            shape = (int(self.output_start[-1]), self.form.shapes.output_width)
            given, dtype = self.request.output_memory, self.request.hidden.dtype
            self._outputs = np.empty(shape, dtype) if given is None else given.memory.view(dtype).reshape(shape)
        return self._outputs

    def put_outputs(self, places: NDArray[np.int64] | slice, values: NDArray[Any]) -> None:
        """Put outputs at their places. An array of nothing but all of these is taken over without a copy."""
        is_whole_batch = values.base is None or values.base.nbytes == values.nbytes
        is_whole_reply = isinstance(places, slice) and places == slice(0, int(self.output_start[-1]))
        if self._outputs is None and self.request.output_memory is None and is_whole_batch and is_whole_reply:
            self._outputs = values
        elif not isinstance(places, slice) or not np.may_share_memory(self.outputs[places], values):
            self.outputs[places] = values  # else the engine has written them where they belong

    def output_of(self, row: int) -> NDArray[Any]:
        """Outputs of one request row, a view."""
        return self.outputs[self.output_start[row] : self.output_start[row + 1]]

    def refuse(self, index: int, refusal: Refusal) -> None:
        """An admitted row (a position in the admission) does not run after all, or its computation failed."""
        self.state[index] = RowState.REFUSED
        self.has_failures = self.has_padding = True
        row = int(self.admission.rows[index])
        self.num_unfinished -= 2 if row in self.ends else 1
        self.ends.discard(row)
        self.refusals[row] = refusal
        self._set_refusal(row, refusal)

    def discard(self, index: int) -> None:
        """An admitted row's state can't be trusted."""
        self.state[index] = RowState.DISCARDED
        self.has_failures = self.has_padding = True

    def not_begun(self) -> NDArray[np.int64]:
        """Admitted rows (positions in the admission) of which no batch has taken a token."""
        return np.flatnonzero((self.state == RowState.WAITING) & (self.cursor == 0))

    def finish(self) -> None:
        """Take over the joined rows' outcomes and tell the result. To be called once."""
        self.is_finished = True
        for join in self.joins:
            source = join.source
            refusal = source.refusals.get(join.source_row)
            if refusal is not None:
                self.refusals[join.row] = refusal
                self._set_refusal(join.row, refusal)
                continue
            self.outcome[join.row] = RowOutcome.JOINED
            if join.row in self.left:
                self.left[join.row][:] = source.left[join.source_row]
            self.position[join.row] = source.position[join.source_row]
            self._copy_output(join.row, source.output_of(join.source_row))
        self.on_done(self._result())

    def _lay_out_outputs(self, rows: list[int]) -> None:
        """Give each of these request rows, and no other, its place in the reply.

        In memory of the client's every row has one: kept replies lie there, so the same step sent again must find and
        leave each where it was, whatever is refused this time.
        """
        form = self.form
        if self.request.output_memory is not None or len(rows) == form.num_rows:
            self.output_start = form.output_start
            return
        counts = np.zeros(form.num_rows, dtype=np.int64)
        counts[rows] = form.output_counts[rows]
        self.output_start = np.concatenate(([0], np.cumsum(counts)))

    def _set_refusal(self, row: int, refusal: Refusal) -> None:
        self.outcome[row] = RowOutcome.REFUSED
        self.position[row] = int(refusal.metadata.get("position", 0))

    def _replay(self, row: int, reply: KeptReply) -> None:
        """A request row has a kept reply."""
        self.outcome[row], self.position[row] = RowOutcome.REPLAYED, reply.position
        if reply.waypoints:
            self.left[row][:] = reply.waypoints
        self._copy_output(row, reply.hidden)

    def _copy_output(self, row: int, values: NDArray[Any]) -> None:
        """Put a row's outputs at their place, unless they lie there already, in memory of the client's."""
        if self.request.output_memory is None:
            self.put_outputs(slice(*self.output_start[row : row + 2].tolist()), values)
        elif (place := self.output_of(row)).ctypes.data != values.ctypes.data:
            place[:] = values

    def _result(self) -> StepResult:
        start, memory, shapes = self.output_start, self.request.output_memory, self.form.shapes
        outputs = self.outputs if self._outputs is None else self._outputs
        refusals = self.refusals
        if refusals:
            refusals = dict(sorted(refusals.items()))
            refused, counts = self.outcome == RowOutcome.REFUSED, np.diff(start)
            if memory is None and counts[refused].any():  # rows that were refused after they had been given a place
                outputs = outputs[np.repeat(~refused, counts)]
                start = np.concatenate(([0], np.cumsum(np.where(refused, 0, counts))))
        if shapes.output_streams:
            outputs = outputs.reshape(len(outputs), *shapes.output_shape)
        timing = self.timing if self.timing.batch_rows else None
        result = StepResult(self.outcome, self.position, start, outputs, refusals, timing, memory)
        if self.left:
            rows = sorted(self.left.keys() - refusals.keys())
            result.waypoints = [(row, place) for row in rows for place in sorted(self.left[row])]
        return result
