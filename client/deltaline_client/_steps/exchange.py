"""The requests of a call: its rows go to the server until each is applied or refused for good. Knows no channel.

They go in rounds. A round sends what is left, several requests in flight at once, and ends when all are answered; after
the first failure it sends nothing more. A step that is sent again is the same step: same number, position, commit,
tokens. What may differ between rounds is which rows share a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array
from deltaline_client._exceptions import (
    CapacityError,
    DeadlineExceeded,
    DeltalineError,
    InvalidSharedMemory,
    MessageTooLarge,
    ProtocolError,
    QueueDeadline,
    TransportError,
)
from deltaline_client._shared_memory.regions import Placement, answered
from deltaline_client._state import ClientState
from deltaline_client._steps.requests import Requests, Sent, Wave, requests_in_flight
from deltaline_client._steps.sequence import Job
from deltaline_client._transport.flow import Flow, Receive, Send, Sleep
from deltaline_client._transport.messages import StepAnswer
from deltaline_client._transport.retry import is_retryable
from deltaline_client._transport.statuses import from_status
from deltaline_client._types import RowOutcome, ServerInfo, StepOptions, StepTiming

Result: TypeAlias = StepAnswer | DeltalineError
"""What became of a request."""


class Exchange:
    """Sends the steps of a call's jobs and applies the answers. One deadline for all of them."""

    def __init__(self, client: ClientState, limits: ServerInfo, options: StepOptions) -> None:
        self._limits = limits
        self._options = options
        self.attempts = client._attempts(options.get("timeout_s"))
        self.shared = client._shared
        self._requests = Requests(limits, options, client._shared)
        self._last_number = 0
        self.timing = StepTiming()
        self.request_error: DeltalineError | None = None
        """What ended the last request as a whole, if it was not answered per row."""

    def run(self, jobs: Sequence[Job], sent: Sent | None = None, answer: Result | None = None) -> Flow[None]:
        """Send steps of each job until all its tokens are applied or it has an error.

        sent, answer: a request that was made of the jobs before, and what it came to: it counts as the first round.
        """
        waiting, errors = list(jobs), dict[Job, DeltalineError]()
        while waiting:
            if self.attempts.next_timeout_s() <= 0:
                self.request_error = DeadlineExceeded("the call's timeout is over")
                for job in waiting:
                    job.error = errors.get(job, self.request_error)
                if sent is not None:
                    self.settle(sent)
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
        if any(job.parts and self._requests.is_whole(job.parts[0]) for job in waiting):  # they can't go inline
            yield from self.shared.ready(self._limits, self.attempts)
        in_flight: dict[int, Sent] = {}
        requests, has_failed = self._requests.of(waiting), False
        try:
            while True:
                while not has_failed and len(in_flight) < requests_in_flight(self._limits):
                    sent = next(requests, None)
                    if sent is None:
                        break
                    self._last_number += 1
                    for _, part in sent.wave:
                        part.was_in_doubt, part.in_doubt = part.in_doubt, True
                        part.error = part.reply = None
                    in_flight[self._last_number] = sent
                    yield Send(self._last_number, self._requests.message(sent))
                if not in_flight:
                    return
                answer = yield Receive(max(0.0, self.attempts.timeout_s()))
                if answer is None:
                    late = DeadlineExceeded("no answer in time")
                    for sent in in_flight.values():
                        self._fail(sent.wave, late)
                    return
                sent = in_flight.pop(answer[0], None)
                if sent is not None:  # else the answer to an attempt that was given up
                    has_failed = not self._take(sent, answer[1]) or has_failed
        finally:
            for sent in in_flight.values():
                self.settle(sent)

    def settle(self, sent: Sent) -> None:
        """An attempt is over for the client; while a row is in doubt the server may still read and write its memory."""
        if sent.placement is not None:
            request = tuple(part for _, part in sent.wave)
            self.shared.settle(request, sent.placement, is_over=not any(part.in_doubt for part in request))

    def _take(self, sent: Sent, answer: Result) -> bool:
        """Note what became of the rows of a request; tell whether all were applied."""
        wave, placement = sent.wave, sent.placement
        is_applied, error = False, answer if isinstance(answer, DeltalineError) else None
        if not isinstance(answer, DeltalineError):
            try:
                is_applied = self._note(sent, answer)
            except ProtocolError as wrong:
                error = wrong.with_traceback(None)  # which would hold the placement
        if error is not None:
            self._fail(wave, error)
            if placement is not None and isinstance(error, InvalidSharedMemory):
                self.shared.lost(placement, error)
            if isinstance(error, CapacityError | MessageTooLarge):
                self._requests.shorten(sent)
        self.settle(sent)
        return is_applied

    def _fail(self, wave: Wave, error: DeltalineError) -> None:
        """A request was refused whole, or not answered."""
        self.request_error = error
        for _, part in wave:
            part.error = error
            part.in_doubt = part.was_in_doubt or isinstance(error, TransportError)

    def _note(self, sent: Sent, answer: StepAnswer) -> bool:
        """Note the answer to each row; tell whether all were applied. Raises ProtocolError, and nothing is noted."""
        wave, fields, outputs = sent.wave, answer.fields, self._outputs(answer, sent.placement)
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
            if self.copies(answer):  # the caller's own; those of a row that is cut are copied into their place
                outputs = outputs.copy()
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

    def copies(self, answer: StepAnswer) -> bool:
        """Whether outputs are copied; not for a caller who takes them as they lie in shared memory."""
        return answer.shared is None or self._options.get("copy", True)

    def _outputs(self, answer: StepAnswer, placement: Placement | None) -> Array:
        """The reply's output rows [rows, *output_shape]. Raises ProtocolError."""
        dtype, shape = self._limits.dtype, self._limits.output_shape(self._options.get("span", 0))
        start = answer.fields.output_start_loc
        if not start or start[-1] == 0:
            return np.empty((0, *shape), dtype)
        hidden = answered(answer, placement)
        if hidden is None or hidden.dtype != dtype or hidden.shape[1:] != shape:
            raise ProtocolError(f"the reply's tensor is not {dtype} [rows, {', '.join(map(str, shape))}]")
        return hidden

    def _may_retry(self, error: DeltalineError) -> bool:
        """Tell whether a row or request is sent again. A queue deadline that the caller set is final."""
        if isinstance(error, QueueDeadline) and self._options.get("queue_timeout_s"):
            return False
        return is_retryable(error) or isinstance(error, InvalidSharedMemory)
