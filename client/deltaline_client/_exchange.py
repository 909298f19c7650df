"""The requests of a call: its rows go to the server until each is applied or refused for good. Knows no channel.

They go in rounds. A round sends what is left, several requests in flight at once, and ends when all are answered; after
the first failure it sends nothing more. A step that is sent again is the same step: same number, position, commit,
tokens. What may differ between rounds is which rows share a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array
from deltaline_client._exceptions import (
    CapacityError,
    DeadlineExceeded,
    DeltalineError,
    ProtocolError,
    QueueDeadline,
    TransportError,
)
from deltaline_client._flow import Flow, Receive, Send, Sleep
from deltaline_client._messages import StepAnswer, step_request
from deltaline_client._retry import is_retryable
from deltaline_client._sequence import Job, Part
from deltaline_client._state import ClientState
from deltaline_client._statuses import from_status
from deltaline_client._types import RowOutcome, ServerInfo, StepOptions, StepTiming

# Most bytes of the steps that a long row is cut into: smaller ones overlap transfer and compute better, larger ones
# cost fewer messages, each of which is milliseconds of work for both sides.
CHUNK_BYTES = 4 * 2**20

_OUTPUT_ROWS = {"all": layers.OUTPUT_ROWS_ALL, "last": layers.OUTPUT_ROWS_LAST, "none": layers.OUTPUT_ROWS_NONE}

Wave: TypeAlias = list[tuple[Job, Part]]
"""The rows of one request."""

Result: TypeAlias = StepAnswer | DeltalineError
"""What became of a request."""


def request_fields(server_epoch: int, options: StepOptions, **columns: Any) -> layers.StepRequest:
    """A StepRequest but for its tensor: what the options say, and the columns of its rows."""
    return layers.StepRequest(
        server_epoch=server_epoch,
        span=options.get("span", 0),
        priority=options.get("priority", 0),
        queue_timeout_us=round((options.get("queue_timeout_s") or 0.0) * 1e6),
        **columns,
    )


class Exchange:
    """Sends the steps of a call's jobs and applies the answers. One deadline for all of them."""

    def __init__(self, client: ClientState, limits: ServerInfo, options: StepOptions) -> None:
        self._limits = limits
        self._options = options
        self.attempts = client._attempts(options.get("timeout_s"))
        self._last_number = 0
        row_bytes = limits.hidden_size * limits.dtype.itemsize
        self._limit = max(1, limits.inline_limit_bytes // row_bytes)
        self._chunk = max(1, min(CHUNK_BYTES, limits.inline_limit_bytes) // row_bytes)
        self.timing = StepTiming()
        self.request_error: DeltalineError | None = None
        """What ended the last request as a whole, if it was not answered per row."""

    def run(self, jobs: Sequence[Job], sent: Wave | None = None, answer: Result | None = None) -> Flow[None]:
        """Send steps of each job until all its tokens are applied or it has an error.

        sent, answer: a request that was made of the jobs before, and what it came to: it counts as the first round.
        """
        waiting, errors = list(jobs), dict[Job, DeltalineError]()
        while waiting:
            if self.attempts.next_timeout_s() <= 0:
                self.request_error = DeadlineExceeded("the call's timeout is over")
                for job in waiting:
                    job.error = errors.get(job, self.request_error)
                return
            done_before = [job.tokens_done for job in waiting]
            if sent is not None and answer is not None:
                self._take(sent, answer)
                sent = None
            else:
                yield from self._round(waiting)
            errors = {}
            for job in waiting:
                job.settle()
                if not job.is_over and job.parts and job.parts[0].error is not None:
                    errors[job] = job.parts[0].error
            delay_s = self.attempts.delay_s(*(error.retry_after_s for error in errors.values()))
            for job, error in errors.items():
                if delay_s is None or not self._may_retry(error):
                    job.error = error
            if any(job.tokens_done > done for job, done in zip(waiting, done_before, strict=True)):
                self.attempts.progressed()
            waiting = [job for job in waiting if not job.is_over]
            if waiting and errors and delay_s is not None:
                yield Sleep(delay_s)

    def _round(self, waiting: Sequence[Job]) -> Flow[None]:
        """Send what is left of the jobs, and gather the answers."""
        in_flight: dict[int, Wave] = {}
        waves, has_failed = self._waves(waiting), False
        while True:
            while not has_failed and len(in_flight) < max(1, self._limits.max_steps_in_flight):
                wave = next(waves, None)
                if wave is None:
                    break
                self._last_number += 1
                for _, part in wave:
                    part.was_in_doubt, part.in_doubt = part.in_doubt, True
                    part.error = part.reply = None
                in_flight[self._last_number] = wave
                yield Send(self._last_number, self._request(wave))
            if not in_flight:
                return
            answer = yield Receive(max(0.0, self.attempts.timeout_s()))
            if answer is None:
                late = DeadlineExceeded("no answer in time")
                for wave in in_flight.values():
                    self._fail(wave, late)
                return
            wave = in_flight.pop(answer[0], None)
            if wave is not None:  # else the answer to an attempt that was given up
                has_failed = not self._take(wave, answer[1]) or has_failed

    def _waves(self, waiting: Sequence[Job]) -> Iterator[Wave]:
        """The requests of a round: rows that fit one together, in order; then long rows, a step of each in turn."""
        wave, budget = Wave(), self._limit
        for job in waiting:
            count = len(job.hidden)
            if count > self._limit:
                continue
            if wave and (
                count > budget
                or len(wave) == self._limits.max_sequences
                or job.output != wave[0][0].output
                or job.sequence.server_epoch != wave[0][0].sequence.server_epoch
            ):
                yield wave
                wave, budget = [], self._limit
            wave.append((job, job.parts[0] if job.parts else job.cut(count)))
            budget -= count
        if wave:
            yield wave
        long = [(job, self._steps(job)) for job in waiting if len(job.hidden) > self._limit]
        while long:
            for turn in list(long):
                job, steps = turn
                part = next(steps, None)
                if part is None:
                    long.remove(turn)
                else:
                    yield [(job, part)]

    def _steps(self, job: Job) -> Iterator[Part]:
        """The steps of a long row that are to be sent: those cut before, then new ones."""
        yield from list(job.parts)
        while job.tokens_cut < len(job.hidden) and job.lost is None:
            yield job.cut(min(self._chunk, len(job.hidden) - job.tokens_cut))

    def _request(self, wave: Wave) -> list[bytes | memoryview]:
        """The serialised StepRequest of a wave, in pieces."""
        job, part = wave[0]
        rows = [part for _, part in wave]
        fields = request_fields(
            job.sequence.server_epoch,
            self._options,
            sequence=[job.sequence.handle for job, _ in wave],
            kind=[job.kind for job, _ in wave],
            step=[part.step for part in rows],
            position=[part.position for part in rows],
            accepted=[part.accepted for part in rows],
            query_start_loc=np.cumsum([0, *(part.count for part in rows)]).tolist(),
            output=_OUTPUT_ROWS[job.wanted(part)],
        )
        hidden = [job.hidden[part.start : part.start + part.count] for job, part in wave]
        return step_request(fields, hidden if len(hidden) == 1 else [np.concatenate(hidden)])

    def _take(self, wave: Wave, answer: Result) -> bool:
        """Note what became of the rows of a request; tell whether all were applied."""
        try:
            if isinstance(answer, DeltalineError):
                raise answer
            return self._note(wave, answer)
        except DeltalineError as error:
            self._fail(wave, error)
            return False

    def _fail(self, wave: Wave, error: DeltalineError) -> None:
        """A request was refused whole, or not answered."""
        self.request_error = error
        for _, part in wave:
            part.error = error
            part.in_doubt = part.was_in_doubt or isinstance(error, TransportError)

    def _note(self, wave: Wave, answer: StepAnswer) -> bool:
        """Note the answer to each row; tell whether all were applied. Raises ProtocolError, and nothing is noted."""
        fields, outputs = answer.fields, self._outputs(answer)
        start, outcomes = list(fields.output_start_loc), list(fields.outcome)
        if (
            len(outcomes) != len(wave)
            or len(fields.position) != len(wave)
            or len(start) != len(wave) + 1
            or sorted(start) != start
            or (start[0], start[-1]) != (0, len(outputs))
        ):
            raise ProtocolError("the reply's arrays do not fit the request")
        statuses = {row.row: row.status for row in fields.row_status}
        if [row for row, outcome in enumerate(outcomes) if outcome == layers.ROW_OUTCOME_REFUSED] != sorted(statuses):
            raise ProtocolError("the reply's statuses do not fit its outcomes")
        if wave[0][1].count == len(wave[0][0].hidden) or wave[0][0].output != "all":
            outputs = outputs.copy()  # the caller's own; those of a long row are copied into their place
        elif len(outputs) not in (0, wave[0][1].count):
            raise ProtocolError(f"asked for {wave[0][1].count} output rows, got {len(outputs)}")
        for row, (_, part) in enumerate(wave):
            if row in statuses:
                part.error = error = from_status(statuses[row])
                # A full server may refuse a resent step before it looks whether the first try was applied.
                part.in_doubt = part.was_in_doubt and isinstance(error, CapacityError)
            else:
                part.in_doubt = False
                outcome = RowOutcome(outcomes[row])
                part.reply = outputs[start[row] : start[row + 1]], fields.position[row], outcome
        for job, _ in wave:
            job.settle()
        self.note_time(fields)
        return not statuses

    def note_time(self, fields: layers.StepResponse) -> None:
        """Add the server's time for a request."""
        if fields.HasField("timing"):
            self.timing = self.timing.plus(fields.timing)

    def _outputs(self, answer: StepAnswer) -> Array:
        """The reply's output rows [rows, hidden_size]. Raises ProtocolError."""
        dtype, width = self._limits.dtype, self._limits.hidden_size
        start = answer.fields.output_start_loc
        if not start or start[-1] == 0:
            return np.empty((0, width), dtype)
        if answer.hidden is None or answer.hidden.dtype != dtype or answer.hidden.shape[1] != width:
            raise ProtocolError(f"the reply's tensor is not {dtype} [rows, {width}]")
        return answer.hidden

    def _may_retry(self, error: DeltalineError) -> bool:
        """Tell whether a row or request is sent again. A queue deadline that the caller set is final."""
        if isinstance(error, QueueDeadline) and self._options.get("queue_timeout_s"):
            return False
        return is_retryable(error)
