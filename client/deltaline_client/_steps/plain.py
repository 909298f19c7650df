"""The ordinary way of a batch, as arrays: one request, one answer, no object per row.

What is out of the ordinary (a sequence with an unfinished step, a batch of several requests, a row refused, an answer
lost) goes on as jobs, by the rules of `_exchange`; this only makes the ordinary case cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

import numpy as np

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array
from deltaline_client._exceptions import DeadlineExceeded, DeltalineError, ProtocolError
from deltaline_client._shared_memory.regions import Placement, answered
from deltaline_client._steps.batch import Batch
from deltaline_client._steps.exchange import Exchange
from deltaline_client._steps.requests import OUTPUT_ROWS, Sent, Wave, message, request_fields
from deltaline_client._steps.rows import RowResult, StepResult
from deltaline_client._steps.sequence import NO_COMMIT, Job, Progress
from deltaline_client._transport.flow import Flow, Receive, Send
from deltaline_client._transport.messages import StepAnswer
from deltaline_client._types import RowOutcome, ServerInfo, StepOptions, StepTiming

_OUTCOMES = {int(outcome): outcome for outcome in RowOutcome}
_DONE = frozenset((layers.ROW_OUTCOME_EXECUTED, layers.ROW_OUTCOME_REPLAYED, layers.ROW_OUTCOME_JOINED))


@dataclass(frozen=True, slots=True)
class Applied:
    """A batch whose rows were all applied: outputs, packed [rows, *output_shape], and what else the reply tells."""

    batch: Batch
    outputs: Array
    fields: layers.StepResponse
    timing: StepTiming

    @property
    def outputs_of_rows(self) -> list[Array]:
        """The outputs of each row, views."""
        return [self.outputs[begin:end] for begin, end in pairwise(self.batch.output_start)]

    def result(self) -> StepResult:
        """The same by rows."""
        batch = self.batch
        columns = zip(
            batch.sequences,
            map(_OUTCOMES.__getitem__, self.fields.outcome),
            self.outputs_of_rows,
            [end - begin for begin, end in pairwise(batch.start)],
            self.fields.position,
            repeat(None),
            strict=False,  # None has no end
        )
        return StepResult(tuple(map(RowResult._make, columns)), self.timing)


class PlainStep:
    """A batch on its way. The call holds `progress`, which is that of each sequence."""

    def __init__(self, batch: Batch, progress: Sequence[Progress], options: StepOptions) -> None:
        self._batch, self._progress, self._options = batch, progress, options

    def is_ordinary(self, limits: ServerInfo) -> bool:
        """Whether one request may carry all rows, and nothing stands against any of them."""
        batch, sequences = self._batch, self._batch.sequences
        output_bytes = batch.output_start[-1] * math.prod(batch.output_shape) * limits.dtype.itemsize
        return (
            0 < len(sequences) <= limits.max_sequences
            and max(output_bytes, sum(array.nbytes for array in batch.hidden)) <= limits.inline_limit_bytes
            and not [one for one in self._progress if one.unfinished is not None]
            and len({sequence.server_epoch for sequence in sequences}) == 1
        )

    def run(self, exchange: Exchange) -> Flow[Applied | list[Job]]:
        """Apply the step. Returns what came of it; or jobs, over and left, when not all was ordinary."""
        batch = self._batch
        placement = exchange.shared.place((self,), batch.hidden, (batch.output_start[-1], *batch.output_shape))
        jobs: list[Job] | None = None
        is_done = False
        try:
            yield Send(0, self._request(placement))
            answer = yield Receive(max(0.0, exchange.attempts.timeout_s()))
            outcome = DeadlineExceeded("no answer in time") if answer is None else answer[1]
            applied = self._applied(outcome, placement, exchange)
            if applied is not None:
                is_done = True
                return applied
            jobs = self._jobs()
            yield from exchange.run(jobs, Sent(_wave(jobs), placement), outcome)
            return jobs
        finally:
            if not is_done:
                if jobs is None:
                    jobs = self._jobs()
                    exchange.settle(Sent(_wave(jobs), placement))
                for job in jobs:
                    job.leave()

    def _request(self, placement: Placement | None) -> list[bytes | memoryview]:
        batch, progress = self._batch, self._progress
        accepted = [one.accepted for one in progress]
        if accepted.count(None) == len(accepted):
            commits, position = [NO_COMMIT] * len(accepted), [one.position for one in progress]
        else:
            commits = [NO_COMMIT if count is None else count for count in accepted]
            position = [one.next_position for one in progress]
        fields = request_fields(
            batch.sequences[0].server_epoch,
            self._options,
            sequence=[sequence.handle for sequence in batch.sequences],
            kind=batch.kinds,
            step=[one.step + 1 for one in progress],
            position=position,
            accepted=commits,
            query_start_loc=batch.start,
            output=OUTPUT_ROWS[batch.output],
        )
        return message(fields, batch.hidden, placement)

    def _applied(
        self, answer: StepAnswer | DeltalineError, placement: Placement | None, exchange: Exchange
    ) -> Applied | None:
        """The outputs, the caller's own, with every sequence advanced; None unless every row was applied."""
        if isinstance(answer, DeltalineError):
            return None
        batch, fields, progress = self._batch, answer.fields, self._progress
        dtype, start = batch.hidden[0].dtype, list(batch.output_start)
        shape = (start[-1], *batch.output_shape)
        try:
            hidden = answered(answer, placement) if start[-1] else np.empty(shape, dtype)
        except ProtocolError:
            return None
        is_plain = (
            not fields.row_status
            and len(fields.outcome) == len(fields.position) == len(progress)
            and _DONE.issuperset(fields.outcome)
            and fields.output_start_loc == start
            and hidden is not None
            and (hidden.shape, hidden.dtype) == (shape, dtype)
        )
        if not is_plain or hidden is None:
            return None
        for one, position in zip(progress, fields.position, strict=True):
            one.advance(position)
        if layers.ROW_KIND_VERIFY in batch.kinds:
            for one, kind, (begin, end) in zip(progress, batch.kinds, pairwise(batch.start), strict=True):
                one.pending_tokens = end - begin if kind == layers.ROW_KIND_VERIFY else 0
        exchange.note_time(fields)
        outputs = hidden.copy() if exchange.copies(answer) else hidden
        return Applied(batch, outputs, fields, exchange.timing)

    def _jobs(self) -> list[Job]:
        """The rows as jobs whose step was sent and may have been applied."""
        jobs = self._batch.jobs(self._progress)
        for job in jobs:
            job.cut(len(job.hidden)).in_doubt = True
        return jobs


def _wave(jobs: Sequence[Job]) -> Wave:
    return [(job, job.parts[0]) for job in jobs]
