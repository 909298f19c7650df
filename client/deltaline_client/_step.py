"""Stepping: rows go to the server until each is applied or refused for good. Flows; they know no channel.

A step that is sent again is the same step: same number, position, commit, tokens. What may differ between attempts is
which rows of the batch are still to be answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array
from deltaline_client._exceptions import (
    CapacityError,
    DeadlineExceeded,
    DeltalineError,
    DuplicateSequence,
    ProtocolError,
    QueueDeadline,
    StepUnfinished,
    TransportError,
)
from deltaline_client._flow import Flow, Sleep, call
from deltaline_client._retry import is_retryable
from deltaline_client._rows import Row, RowResult, StepError, StepResult
from deltaline_client._sequence import Job, SequenceRecord
from deltaline_client._shared import Placement
from deltaline_client._shared_exceptions import InvalidSharedMemory
from deltaline_client._state import MAX_MESSAGE_BYTES, STEP, ClientState, info
from deltaline_client._statuses import from_status
from deltaline_client._types import Output, RowOutcome, ServerInfo, StepOptions, StepTiming

_OUTPUT_ROWS = {"all": layers.OUTPUT_ROWS_ALL, "last": layers.OUTPUT_ROWS_LAST, "none": layers.OUTPUT_ROWS_NONE}


def step(
    client: ClientState, rows: Sequence[Row], *, output: Output = "all", **options: Unpack[StepOptions]
) -> Flow[StepResult]:
    """Apply one step to each of several sequences: prefill, decode and verify rows in one batch.

    A batch that is larger than one request may be is sent as several, one after the other; so is a long prefill row. A
    verify's commit, if one is remembered, rides on its sequence's row. Sequences advance only by what was applied.

    Raises: ValueError and TypeError for wrong arrays; StepUnfinished, SequenceBusy, DuplicateSequence before anything
    is sent; StepError when rows failed, with the results of those that did not; the error itself when nothing at all
    ran because of it.
    """
    limits = yield from info(client)
    span = options.get("span", 0)
    jobs = [row.to_job(f"rows[{index}]", limits, span, output) for index, row in enumerate(rows)]
    for index, job in enumerate(jobs):
        unfinished = job.progress.unfinished
        if unfinished is not None:
            if not unfinished.is_same_row(job):
                raise StepUnfinished(f"rows[{index}]: a step has an unknown outcome; resume it, or repeat that call")
            jobs[index] = unfinished
    return (yield from _run(client, jobs, limits, options))


def resume(
    client: ClientState, sequences: Sequence[SequenceRecord], **options: Unpack[StepOptions]
) -> Flow[StepResult]:
    """Send unfinished steps again, and finish the rows that they belong to.

    A step whose call ended without an answer (its timeout was over, it was cancelled) may have been applied or not. The
    sequence remembers it; this sends the same step, so that it is applied once either way, and returns what the first
    call would have returned. Making that call again does the same.

    Raises: ValueError when a sequence has no unfinished step on the span; else as `step`.
    """
    limits = yield from info(client)
    jobs = []
    for index, sequence in enumerate(sequences):
        unfinished = sequence.progress(options.get("span", 0)).unfinished
        if unfinished is None:
            raise ValueError(f"sequences[{index}]: no unfinished step")
        jobs.append(unfinished)
    return (yield from _run(client, jobs, limits, options))


def _run(client: ClientState, jobs: list[Job], limits: ServerInfo, options: StepOptions) -> Flow[StepResult]:
    """Run jobs to their end and gather the results. Raises as `step` does."""
    if len({id(job.sequence) for job in jobs}) != len(jobs):
        raise DuplicateSequence("a sequence is in the batch twice")
    held: list[Job] = []
    yield from client._shared.ready(limits)
    exchange = _Exchange(client, limits, options)
    try:
        for job in jobs:
            job.progress.acquire()
            held.append(job)
            job.error = None
        waiting = jobs
        while waiting:
            yield from exchange.run(_wave(waiting, limits))
            waiting = [job for job in waiting if not job.is_over]
    finally:
        for job in held:
            job.leave()
    results = tuple(RowResult.from_job(job) for job in jobs)
    if all(job.error is None for job in jobs):
        return StepResult(results, exchange.timing)
    whole = exchange.request_error
    if whole is not None and all(job.error is whole and not job.tokens_done for job in jobs):
        raise whole
    raise StepError(results)


def _wave(waiting: Sequence[Job], limits: ServerInfo) -> list[Job]:
    """Choose the rows of the next request and the piece of each: as many as fit, in order."""
    first = waiting[0]
    limit = max(1, limits.inline_limit_bytes // (limits.hidden_size * limits.dtype.itemsize))
    budget = limit
    wave: list[Job] = []
    for job in waiting:
        same_request = job.output == first.output and job.sequence.server_epoch == first.sequence.server_epoch
        piece = job.next_piece(budget, limit) if same_request and len(wave) < limits.max_sequences else 0
        if piece:
            job.piece = piece
            budget -= piece
            wave.append(job)
    return wave


class _Exchange:
    """The requests of one call: sends waves of rows and applies the answers. One deadline for all of them."""

    def __init__(self, client: ClientState, limits: ServerInfo, options: StepOptions) -> None:
        self._shared = client._shared
        self._placement: Placement | None = None
        self._limits = limits
        self._options = options
        self._attempts = client._attempts(options.get("timeout_s"))
        self.timing = StepTiming()
        self.request_error: DeltalineError | None = None
        """What ended the last request as a whole, if it was not answered per row."""

    def run(self, wave: list[Job]) -> Flow[None]:
        """Send one step of each job until each is applied or has an error."""
        request, errors = self._request(wave), dict[Job, DeltalineError]()
        while wave:
            timeout_s = self._attempts.next_timeout_s()
            if timeout_s <= 0:
                self.request_error = DeadlineExceeded("the call's timeout is over")
                for job in wave:
                    job.error = errors.get(job, self.request_error)
                return
            errors = yield from self._attempt(wave, request, timeout_s)
            delay_s = self._attempts.delay_s(*(error.retry_after_s for error in errors.values()))
            for job, error in errors.items():
                if delay_s is None or not self._may_retry(error):
                    job.error = error
            left = [job for job in errors if job.error is None]
            if left and delay_s is not None:
                yield Sleep(delay_s)
            if len(left) != len(wave) or isinstance(self.request_error, InvalidSharedMemory):
                wave, request = left, self._request(left)
        self._attempts.progressed()

    def _attempt(self, wave: list[Job], request: bytes, timeout_s: float) -> Flow[dict[Job, DeltalineError]]:
        """Send a request once; return what was not applied, and why. While it runs, every row is in doubt."""
        doubts = [job.in_doubt for job in wave]
        for job in wave:
            job.in_doubt = True
        is_over = False
        try:
            response = yield from call(STEP, request, timeout_s)
            is_over = True
            return self._apply(wave, doubts, response)
        except DeltalineError as error:
            is_over = is_over or not isinstance(error, TransportError)
            self.request_error = error
            for job, doubt in zip(wave, doubts, strict=True):
                job.in_doubt = doubt or isinstance(error, TransportError)
            return dict.fromkeys(wave, error)
        finally:
            if self._placement is not None:
                self._shared.settle(self._placement, is_over=is_over)

    def _request(self, wave: list[Job]) -> bytes:
        """The serialised StepRequest for the current piece of each job; b"" for no jobs."""
        if not wave:
            return b""
        pieces = [job.hidden[job.tokens_done : job.tokens_done + job.piece] for job in wave]
        request = layers.StepRequest(
            server_epoch=wave[0].sequence.server_epoch,
            span=self._options.get("span", 0),
            sequence=[job.sequence.handle for job in wave],
            kind=[job.kind for job in wave],
            step=[job.progress.step + 1 for job in wave],
            position=[job.progress.next_position for job in wave],
            accepted=[job.accepted for job in wave],
            query_start_loc=np.cumsum([0, *(job.piece for job in wave)]).tolist(),
            output=_OUTPUT_ROWS[wave[0].output],
            priority=self._options.get("priority", 0),
            queue_timeout_us=round((self._options.get("queue_timeout_s") or 0.0) * 1e6),
        )
        num_outputs = {"all": sum(job.piece for job in wave), "last": len(wave), "none": 0}[wave[0].output]
        self._placement = placement = self._shared.place(pieces, num_outputs)
        if placement is None:
            hidden = wire.tensor_pieces(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
        else:
            request.output_slice.CopyFrom(placement.output_slice())
            hidden = [placement.tensor()]
        tensor = wire.field_pieces(layers.StepRequest.HIDDEN_FIELD_NUMBER, hidden)
        return b"".join([request.SerializeToString(), *tensor])

    def _apply(self, wave: list[Job], doubts: list[bool], response: layers.StepResponse) -> dict[Job, DeltalineError]:
        """Advance the jobs that were applied; return why the others were not. Raises ProtocolError."""
        start = list(response.output_start_loc)
        outputs = self._outputs(response)
        if (
            len(response.outcome) != len(wave)
            or len(response.position) != len(wave)
            or len(start) != len(wave) + 1
            or sorted(start) != start
            or (start[0], start[-1]) != (0, len(outputs))
        ):
            raise ProtocolError("the reply's arrays do not fit the request")
        statuses = {row.row: row.status for row in response.row_status}
        refused = [row for row, outcome in enumerate(response.outcome) if outcome == layers.ROW_OUTCOME_REFUSED]
        if refused != sorted(statuses):
            raise ProtocolError("the reply's statuses do not fit its outcomes")
        errors: dict[Job, DeltalineError] = {}
        for row, job in enumerate(wave):
            if row in statuses:
                errors[job] = error = from_status(statuses[row])
                # A full server may refuse a resent step before it looks whether the first try was applied.
                job.in_doubt = doubts[row] and isinstance(error, CapacityError)
            else:
                outcome = RowOutcome(response.outcome[row])
                job.applied(outputs[start[row] : start[row + 1]], response.position[row], outcome)
        if response.HasField("timing"):
            self.timing = self.timing.plus(response.timing)
        return errors

    def _outputs(self, response: layers.StepResponse) -> Array:
        """The reply's output rows [rows, hidden_size], writable. Raises ProtocolError."""
        empty = np.empty((0, self._limits.hidden_size), self._limits.dtype)
        if not response.output_start_loc or response.output_start_loc[-1] == 0:
            return empty
        if self._placement is not None and response.hidden.HasField("shared"):
            outputs = self._placement.outputs(response.hidden)
            return outputs.copy() if self._options.get("copy", True) else outputs
        try:
            outputs = wire.decode(response.hidden, limit_bytes=MAX_MESSAGE_BYTES, field="hidden")
        except wire.WireError as error:
            raise ProtocolError(f"the reply's tensor is malformed: {error}") from error
        if outputs.dtype != empty.dtype or outputs.ndim != 2 or outputs.shape[1] != empty.shape[1]:
            raise ProtocolError(f"the reply's tensor is {outputs.dtype} {outputs.shape}")
        return outputs.copy()

    def _may_retry(self, error: DeltalineError) -> bool:
        """Tell whether a row or request is sent again. A queue deadline that the caller set is final."""
        if isinstance(error, QueueDeadline) and self._options.get("queue_timeout_s"):
            return False
        return is_retryable(error) or self._shared.lost(error)
