"""A decode of many sequences as arrays: one request, one answer, no object per row.

What is out of the ordinary (a sequence with an unfinished step, a batch of several requests, a row refused, an answer
lost) goes on as jobs, by the rules of `_exchange`; this only makes the ordinary case cheap.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array
from deltaline_client._exceptions import DeadlineExceeded, DeltalineError, ProtocolError
from deltaline_client._exchange import Exchange
from deltaline_client._flow import Flow, Receive, Send
from deltaline_client._messages import StepAnswer, shared_step_request, step_request
from deltaline_client._requests import Sent, Wave, request_fields
from deltaline_client._sequence import NO_COMMIT, Job, SequenceRecord
from deltaline_client._shared import Placement, answered
from deltaline_client._types import ServerInfo, StepOptions

_DONE = frozenset((layers.ROW_OUTCOME_EXECUTED, layers.ROW_OUTCOME_REPLAYED, layers.ROW_OUTCOME_JOINED))


class PlainDecode:
    """One token for each of N sequences: hidden [N, hidden_size] in the server's type."""

    def __init__(self, sequences: Sequence[SequenceRecord], hidden: Array, options: StepOptions) -> None:
        self._sequences, self._hidden, self._options = sequences, hidden, options
        span = options.get("span", 0)
        self._progress = [sequence.progress(span) for sequence in sequences]

    def is_ordinary(self, limits: ServerInfo) -> bool:
        """Whether one request may carry all rows, and nothing stands against any of them."""
        epoch = self._sequences[0].server_epoch
        return (
            len(self._sequences) <= limits.max_sequences
            and self._hidden.nbytes <= limits.inline_limit_bytes
            and len(set(self._progress)) == len(self._progress)
            and not any(progress.busy or progress.unfinished is not None for progress in self._progress)
            and all(sequence.server_epoch == epoch for sequence in self._sequences)
        )

    def run(self, exchange: Exchange) -> Flow[Array | list[Job]]:
        """Apply the step. Returns the outputs [N, hidden_size]; or jobs, over and left, when not all was ordinary."""
        placement = exchange.shared.place((self,), [self._hidden], len(self._hidden))
        for progress in self._progress:
            progress.busy = True
        jobs: list[Job] | None = None
        is_done = False
        try:
            yield Send(0, self._request(placement))
            answer = yield Receive(max(0.0, exchange.attempts.timeout_s()))
            outcome = DeadlineExceeded("no answer in time") if answer is None else answer[1]
            outputs = self._outputs(outcome, placement, exchange)
            if outputs is not None:
                is_done = True
                return outputs
            jobs = self._jobs()
            yield from exchange.run(jobs, Sent(_wave(jobs), placement), outcome)
            return jobs
        finally:
            if is_done:
                for progress in self._progress:
                    progress.busy = False
            else:
                if jobs is None:
                    jobs = self._jobs()
                    exchange.settle(Sent(_wave(jobs), placement))
                for job in jobs:
                    job.leave()

    def _request(self, placement: Placement | None) -> list[bytes | memoryview]:
        progress = self._progress
        fields = request_fields(
            self._sequences[0].server_epoch,
            self._options,
            sequence=[sequence.handle for sequence in self._sequences],
            kind=[layers.ROW_KIND_DECODE] * len(progress),
            step=[one.step + 1 for one in progress],
            position=[one.next_position for one in progress],
            accepted=[NO_COMMIT if one.accepted is None else one.accepted for one in progress],
            query_start_loc=range(len(progress) + 1),
            output=layers.OUTPUT_ROWS_ALL,
        )
        if placement is None:
            return step_request(fields, [self._hidden])
        fields.output_slice.CopyFrom(placement.output_slice())
        return shared_step_request(fields, placement.tensor())

    def _outputs(
        self, answer: StepAnswer | DeltalineError, placement: Placement | None, exchange: Exchange
    ) -> Array | None:
        """The outputs, the caller's own, with every sequence advanced; None unless every row was applied."""
        if isinstance(answer, DeltalineError):
            return None
        fields, progress = answer.fields, self._progress
        try:
            hidden = answered(answer, placement)
        except ProtocolError:
            return None
        is_plain = (
            not fields.row_status
            and len(fields.outcome) == len(fields.position) == len(progress)
            and _DONE.issuperset(fields.outcome)
            and list(fields.output_start_loc) == list(range(len(progress) + 1))
            and hidden is not None
            and (hidden.shape, hidden.dtype) == (self._hidden.shape, self._hidden.dtype)
        )
        if not is_plain or hidden is None:
            return None
        for one, position in zip(progress, fields.position, strict=True):
            one.advance(position)
        exchange.note_time(fields)
        return hidden.copy() if exchange.copies(answer) else hidden

    def _jobs(self) -> list[Job]:
        """The rows as jobs whose step was sent and may have been applied."""
        jobs = []
        for row, (sequence, progress) in enumerate(zip(self._sequences, self._progress, strict=True)):
            job = Job(sequence, progress, layers.ROW_KIND_DECODE, self._hidden[row : row + 1], "all")
            job.cut(1).in_doubt = True
            jobs.append(job)
        return jobs


def _wave(jobs: Sequence[Job]) -> Wave:
    return [(job, job.parts[0]) for job in jobs]
