"""One request on its way: the rows of a batch as arrays, and one by one only where not all of them were applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat

import numpy as np

from deltaline.v1 import layer_service_pb2 as layers
from deltaline.wire import Buffer
from deltaline_client._arrays import Array
from deltaline_client._exceptions import ProtocolError
from deltaline_client._shared_memory.regions import Placement, SharedMemory, shared_outputs
from deltaline_client._steps.batch import Batch
from deltaline_client._steps.rows import RowResult, StepResult
from deltaline_client._steps.sequence import NO_COMMIT, Progress, RowProgress, RowStep
from deltaline_client._transport.messages import StepAnswer, shared_step_request, step_request
from deltaline_client._types import RowOutcome, StepOptions, StepTiming

_OUTPUT_ROWS = {"all": layers.OUTPUT_ROWS_ALL, "last": layers.OUTPUT_ROWS_LAST, "none": layers.OUTPUT_ROWS_NONE}
_APPLIED = frozenset((layers.ROW_OUTCOME_EXECUTED, layers.ROW_OUTCOME_REPLAYED, layers.ROW_OUTCOME_JOINED))


@dataclass(eq=False, slots=True)
class Request:
    """A StepRequest: the next step of each row of a batch.

    steps, positions, accepted: of each row, as they go on the wire. placement: where the tensors lie, None for in the
    message. applied: set once all rows of a batch were applied as arrays.
    """

    batch: Batch
    steps: Sequence[int]
    positions: Sequence[int]
    accepted: Sequence[int]
    placement: Placement | None = None
    _progress: Sequence[Progress] = ()
    _rows: Sequence[tuple[RowProgress, RowStep]] = ()
    applied: Applied | None = None

    @classmethod
    def of_batch(cls, batch: Batch, progress: Sequence[Progress]) -> Request:
        """All rows of a batch, each with all its tokens; progress: that of each sequence."""
        steps, positions, accepted = [], [], []
        for one in progress:
            steps.append(one.step + 1)
            positions.append(one.position + (one.accepted or 0))
            accepted.append(NO_COMMIT if one.accepted is None else one.accepted)
        return cls(batch, steps, positions, accepted, _progress=progress)

    @classmethod
    def of_steps(cls, rows: Sequence[tuple[RowProgress, RowStep]]) -> Request:
        """Steps that were cut from rows before."""
        return cls(
            Batch.of_steps(rows),
            [step.number for _, step in rows],
            [step.position for _, step in rows],
            [step.accepted for _, step in rows],
            _rows=rows,
        )

    def rows(self) -> Sequence[tuple[RowProgress, RowStep]]:
        """The rows one by one. Those of a batch are taken apart here: their steps are sent, so they are in doubt."""
        if not self._rows:
            self._rows = [(row, row.cut(len(row.hidden))) for row in self.batch.rows(self._progress)]
            for _, step in self._rows:
                step.in_doubt = True
        return self._rows

    def place(self, shared: SharedMemory) -> None:
        """Put the tensors into shared memory, if it has room."""
        batch, key = self.batch, tuple([step for _, step in self._rows]) if self._rows else (self,)
        self.placement = shared.place(key, batch.hidden, (batch.output_start[-1], *batch.output_shape))

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

    def message(self, options: StepOptions) -> list[Buffer]:
        """The serialised StepRequest in pieces."""
        batch = self.batch
        fields = layers.StepRequest(
            server_epoch=batch.sequences[0].server_epoch,
            span=options.get("span", 0),
            priority=options.get("priority", 0),
            queue_timeout_us=round((options.get("queue_timeout_s") or 0.0) * 1e6),
            sequence=[sequence.handle for sequence in batch.sequences],
            kind=batch.kinds,
            step=self.steps,
            position=self.positions,
            accepted=self.accepted,
            query_start_loc=batch.start,
            output=_OUTPUT_ROWS[batch.output],
        )
        if self.placement is None:
            return step_request(fields, batch.hidden[0] if len(batch.hidden) == 1 else np.concatenate(batch.hidden))
        fields.output_slice.CopyFrom(self.placement.output_slice())
        return shared_step_request(fields, self.placement.tensor())

    def read(self, answer: StepAnswer) -> Array:
        """The output rows of a reply, packed: a view of it, or of shared memory. Raises ProtocolError."""
        batch, fields, start = self.batch, answer.fields, list(self.batch.output_start)
        if fields.row_status or not _APPLIED.issuperset(fields.outcome):
            refused = {row.row for row in fields.row_status}
            if refused != {row for row, outcome in enumerate(fields.outcome) if outcome not in _APPLIED}:
                raise ProtocolError("the reply's statuses do not fit its outcomes")
            if answer.shared is None:  # there, refused rows have their place
                counts = [0 if row in refused else end - begin for row, (begin, end) in enumerate(pairwise(start))]
                start = list(accumulate(counts, initial=0))
        if not len(fields.outcome) == len(fields.position) == len(self.steps) or fields.output_start_loc != start:
            raise ProtocolError("the reply's arrays do not fit the request")
        dtype, shape = batch.hidden[0].dtype, (start[-1], *batch.output_shape)
        if start[-1] == 0:
            return np.empty(shape, dtype)
        hidden = answer.hidden if answer.shared is None else shared_outputs(answer.shared, self.placement)
        if hidden is None or hidden.dtype != dtype or hidden.shape != shape:
            raise ProtocolError(f"the reply's tensor is not {dtype} [{', '.join(map(str, shape))}]")
        return hidden

    def advance(self, reply: layers.StepResponse) -> bool:
        """Advance the sequences of a batch all of whose rows were applied; False where rows go on one by one."""
        if self._rows or reply.row_status:
            return False
        for one, position in zip(self._progress, reply.position, strict=True):
            one.step += 1
            one.position = position
            if one.pending_tokens:  # else nothing is remembered of a commit
                one.committed(position)
        batch = self.batch
        if layers.ROW_KIND_VERIFY in batch.kinds:
            for one, kind, (begin, end) in zip(self._progress, batch.kinds, pairwise(batch.start), strict=True):
                one.pending_tokens = end - begin if kind == layers.ROW_KIND_VERIFY else 0
        return True


@dataclass(frozen=True, slots=True)
class Applied:
    """A batch all of whose rows were applied at once: packed outputs [rows, *output_shape], and the reply's fields."""

    batch: Batch
    outputs: Array
    reply: layers.StepResponse
    timing: StepTiming

    @property
    def outputs_of_rows(self) -> list[Array]:
        """The outputs of each row, views."""
        return [self.outputs[begin:end] for begin, end in pairwise(self.batch.output_start)]

    def result(self) -> StepResult:
        """The same by rows."""
        columns = zip(
            self.batch.sequences,
            map(RowOutcome, self.reply.outcome),
            self.outputs_of_rows,
            [end - begin for begin, end in pairwise(self.batch.start)],
            self.reply.position,
            repeat(None),
            strict=False,  # None has no end
        )
        return StepResult(tuple(map(RowResult._make, columns)), self.timing)
