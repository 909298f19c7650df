"""One request on its way: the rows of a batch as arrays, and one by one only where not all of them were applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat

import numpy as np

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array
from deltaline_client._exceptions import ProtocolError
from deltaline_client._shared_memory.regions import Placement, SharedMemory, shared_outputs
from deltaline_client._steps.batch import Batch
from deltaline_client._steps.hold import Hold
from deltaline_client._steps.rows import RowResult, StepResult
from deltaline_client._steps.sequence import NO_COMMIT, RowProgress, RowStep
from deltaline_client._table import COMMIT, COMMIT_IN_DOUBT, PENDING, POSITION, STEP, Home, Numbers
from deltaline_client._transport.flow import Server
from deltaline_client._transport.messages import StepAnswer, StepColumns, step_request
from deltaline_client._types import RowOutcome, StepOptions, StepTiming

_OUTPUT_ROWS = {"all": layers.OUTPUT_ROWS_ALL, "last": layers.OUTPUT_ROWS_LAST, "none": layers.OUTPUT_ROWS_NONE}
_APPLIED = bytes((layers.ROW_OUTCOME_EXECUTED, layers.ROW_OUTCOME_REPLAYED, layers.ROW_OUTCOME_JOINED))

_NO_COMMIT = np.array(NO_COMMIT, "<i4").tobytes()


@dataclass(eq=False, slots=True)
class Request:
    """A StepRequest: the next step of each row of a batch.

    at: who holds its sequences. steps, positions: of each row. handles, accepted: of each row, as they lie on the wire.
    placement: where the tensors lie, None for in the message. applied: set once all rows of a batch were applied as
    arrays.
    """

    batch: Batch
    at: Server
    handles: bytes
    steps: Numbers
    positions: Numbers
    accepted: bytes
    placement: Placement | None = None
    _hold: Hold | None = None
    _rows: Sequence[tuple[RowProgress, RowStep]] = ()
    applied: Applied | None = None

    @classmethod
    def of_batch(cls, batch: Batch, hold: Hold) -> Request:
        """All rows of a batch, each with all its tokens; hold: of their sequences."""
        numbers, at, handles = hold.numbers, hold.group.at, hold.group.handles
        steps, positions = numbers[STEP] + 1, numbers[POSITION]
        if hold.is_plain:
            return cls(batch, at, handles, steps, positions, _NO_COMMIT * len(steps), _hold=hold)
        accepted = numbers[COMMIT] + NO_COMMIT
        positions = positions + np.maximum(accepted, 0)
        return cls(batch, at, handles, steps, positions, accepted.astype("<i4").tobytes(), _hold=hold)

    @classmethod
    def of_steps(cls, rows: Sequence[tuple[RowProgress, RowStep]]) -> Request:
        """Steps that were cut from rows before, which have one home server."""
        numbers = np.array([(step.number, step.position, step.accepted) for _, step in rows], "<i8").T
        at, handles = rows[0][0].home.at, np.array([row.home.handle for row, _ in rows], "<u8").tobytes()
        accepted = numbers[2].astype("<i4").tobytes()
        return cls(Batch.of_steps(rows), at, handles, numbers[0], numbers[1], accepted, _rows=rows)

    def rows(self) -> Sequence[tuple[RowProgress, RowStep]]:
        """The rows one by one. Those of a batch are taken apart here: their steps are sent, so they are in doubt.

        They are what was sent, not what follows from the progress: that may have advanced when a call is interrupted.
        """
        if self._hold is not None and not self._rows:
            handles, accepted = np.frombuffer(self.handles, "<u8"), np.frombuffer(self.accepted, "<i4")
            columns = [column.tolist() for column in (handles, self.steps, self.positions, accepted)]
            rows = list[tuple[RowProgress, RowStep]]()
            for row, handle, number, position, folded in zip(
                self.batch.rows(self._hold.progress), *columns, strict=True
            ):
                step = RowStep(number, position, folded, 0, len(row.hidden), in_doubt=True)
                row.home = Home(self.at, handle)
                row.steps.append(step)
                rows.append((row, step))
            self._rows = rows
        return self._rows

    def place(self, shared: SharedMemory) -> None:
        """Put the tensors into shared memory, if it is of who holds the sequences and has room."""
        if shared.server.epoch not in (0, self.at.epoch):
            return
        batch, key = self.batch, tuple([step for _, step in self._rows]) if self._rows else (self,)
        shape = int(batch.start[-1]), *batch.input_shape
        self.placement = shared.place(key, batch.hidden, shape, (int(batch.output_start[-1]), *batch.output_shape))

    def end(self, shared: SharedMemory) -> None:
        """The attempt is over; while a row is in doubt the server may still read and write the request's memory."""
        if self.placement is not None and self.applied is None:
            steps = tuple(step for _, step in self.rows())
            shared.end_attempt(steps, self.placement, is_over=not any(step.in_doubt for step in steps))

    def begin(self) -> None:
        """The request is about to be sent."""
        for _, step in self._rows:
            step.was_in_doubt, step.in_doubt = step.in_doubt, True
            step.error = step.reply = None

    def message(self, options: StepOptions, most_reply_bytes: int) -> list[wire.Buffer]:
        """The serialised StepRequest in pieces. most_reply_bytes: what may come back in a message."""
        batch, place = self.batch, self.placement
        columns = StepColumns(
            self.handles,
            batch.kinds,
            self.steps.tobytes(),
            self.positions.tobytes(),
            self.accepted,
            batch.start.tobytes(),
        )
        queue_timeout_s = options.get("queue_timeout_s")
        return step_request(
            self.at.epoch,
            options.get("span", 0),
            columns,
            _OUTPUT_ROWS[batch.output],
            options.get("priority", 0),
            0 if queue_timeout_s is None else max(1, round(queue_timeout_s * 1e6)),
            wire.tensor_pieces(batch.packed()) if place is None else [place.tensor],
            (b"" if place is None else place.output_slice) + (self._waypoints() if self._rows else b""),
            most_reply_bytes,
        )

    def _waypoints(self) -> bytes:
        """The serialised field, of rows that leave snapshots on their way."""
        placed = [(i, row.places, step) for i, (row, step) in enumerate(self._rows) if row.places is not None]
        if not placed:
            return b""
        made = [places.message(i, step.start, step.count) for i, places, step in placed]
        return layers.StepRequest(waypoints=[one for one in made if one is not None]).SerializeToString()

    def read(self, answer: StepAnswer) -> Array:
        """The output rows of a reply, packed: a view of it, or of shared memory. Raises ProtocolError."""
        batch, outcome, start = self.batch, answer.outcome, self.batch.output_start
        if not len(outcome) == len(answer.position) == len(self.steps):
            raise ProtocolError("the reply's arrays do not fit the request")
        statuses = answer.fields.row_status
        if statuses or outcome.strip(_APPLIED):
            refused = {row.row for row in statuses}
            if refused != {row for row, one in enumerate(outcome) if one not in _APPLIED}:
                raise ProtocolError("the reply's statuses do not fit its outcomes")
            if answer.shared is None:  # there, refused rows have their place
                counts = np.diff(start)
                counts[list(refused)] = 0
                start = np.append(start[:1], np.cumsum(counts, dtype=start.dtype))
        if answer.output_start_loc != start.tobytes():
            raise ProtocolError("the reply's arrays do not fit the request")
        dtype, shape = batch.hidden[0].dtype, (int(start[-1]), *batch.output_shape)
        if shape[0] == 0:
            return np.empty(shape, dtype)
        hidden = answer.hidden if answer.shared is None else shared_outputs(answer.shared, self.placement)
        if hidden is None or hidden.dtype != dtype or hidden.shape != shape:
            raise ProtocolError(f"the reply's tensor is not {dtype} [{', '.join(map(str, shape))}]")
        return hidden

    def advance(self, answer: StepAnswer) -> bool:
        """Advance the sequences of a batch all of whose rows were applied; False where rows go on one by one."""
        hold, batch = self._hold, self.batch
        if hold is None or self._rows or answer.fields.row_status:
            return False
        columns: dict[int, Numbers | int] = {STEP: self.steps, POSITION: answer.position}
        if not hold.is_plain:  # else nothing is remembered of a commit
            columns |= {PENDING: 0, COMMIT: 0, COMMIT_IN_DOUBT: 0}
        if layers.ROW_KIND_VERIFY in batch.kinds:
            is_verify = np.frombuffer(batch.kinds, np.uint8) == layers.ROW_KIND_VERIFY
            columns[PENDING] = np.diff(batch.start) * is_verify
        hold.ledger.write(hold.group.slots, columns)
        return True


class Applied(StepResult):
    """A batch all of whose rows were applied at once: packed outputs [rows, *output_shape].

    What there is of each row is made when it is asked for.
    """

    def __init__(self, batch: Batch, packed: Array, answer: StepAnswer, timings: Sequence[layers.StepTiming]) -> None:
        # Of batch and answer no more than is told: the others hold a request's and a reply's memory.
        self.packed = packed
        self._sequences, self._start, self._output_start = batch.sequences, batch.start, batch.output_start
        self._outcome, self._position, self._timings = answer.outcome, answer.position, timings

    @cached_property
    def timing(self) -> StepTiming:
        """Where the server's time went."""
        return StepTiming.of(self._timings)

    @property
    def outputs(self) -> list[Array]:
        """The outputs of each row, views."""
        return [self.packed[begin:end] for begin, end in pairwise(self._output_start.tolist())]

    @cached_property
    def rows(self) -> tuple[RowResult, ...]:
        """What became of each row, in order."""
        columns = zip(
            self._sequences,
            map(RowOutcome, self._outcome),
            self.outputs,
            np.diff(self._start).tolist(),
            self._position.tolist(),
            repeat(None),
            strict=False,  # None has no end
        )
        return tuple(map(RowResult._make, columns))
