"""The exchange of a call: its rows go to the server until each is applied or refused for good.

They go in rounds. A round sends what is left, several requests in flight at once, and ends when all are answered; after
the first failure it sends nothing more. A step that is sent again is the same step: same number, position, commit,
tokens. What may differ between rounds is which rows share a request.

The first round of an ordinary batch is one request, made and answered as arrays. Only when it does not end well, or the
batch is out of the ordinary (larger than a request, a row that is unfinished), are there objects for its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from deltaline.v1 import layer_service_pb2 as layers
from deltaline.wire import Buffer
from deltaline_client._arrays import Array
from deltaline_client._exceptions import (
    CapacityError,
    DeadlineExceeded,
    DeltalineError,
    InvalidSharedMemory,
    MessageTooLarge,
    ProtocolError,
    QueueDeadline,
    StateElsewhere,
    StepUnfinished,
    TransportError,
)
from deltaline_client._prefixes import Waypoint, Waypoints
from deltaline_client._state import ClientState, rerouted
from deltaline_client._steps.batch import Batch
from deltaline_client._steps.hold import Group, Hold
from deltaline_client._steps.moves import followed
from deltaline_client._steps.options import check_options
from deltaline_client._steps.packing import Packing, requests_in_flight
from deltaline_client._steps.request import Applied, Request
from deltaline_client._steps.rows import RowResult, StepError, StepResult
from deltaline_client._steps.sequence import RowProgress
from deltaline_client._table import UNFINISHED
from deltaline_client._transport.channels.channel import MAX_MESSAGE_BYTES, MAX_TENSOR_BYTES
from deltaline_client._transport.flow import Flow, Receive, Send, Sleep
from deltaline_client._transport.messages import StepAnswer
from deltaline_client._transport.retry import is_retryable
from deltaline_client._transport.statuses import from_status
from deltaline_client._types import RowOutcome, ServerInfo, StepOptions, StepTiming

Answer: TypeAlias = StepAnswer | DeltalineError
"""What became of a request."""


class Exchange:
    """Sends the steps of a call and applies the answers. One deadline for all of them. span: which they address."""

    def __init__(self, client: ClientState, limits: ServerInfo, options: StepOptions) -> None:
        """Raises TypeError and ValueError for keywords that no step takes, and values that can't be."""
        if options:
            check_options(options)
        self._client, self._limits, self._options = client, limits, options
        self.span = options.get("span", 0)
        self._attempts = client._attempts(options.get("timeout_s"))
        self._shared = client._shared
        # A larger message would end a channel's stream, and with it the steps of other calls; a linked client may have
        # to take a channel at any time.
        self._most_bytes = min(limits.inline_limit_bytes, MAX_TENSOR_BYTES)
        # By the link a reply is as large as the server makes it, by a channel as that takes.
        self._most_reply_bytes = limits.max_reply_bytes if limits.is_linked else MAX_MESSAGE_BYTES
        self._last_number = 0
        self._timings: list[layers.StepTiming] = []
        # What ended the last request as a whole, if it was not answered per row.
        self._request_error: DeltalineError | None = None

    @cached_property
    def _packing(self) -> Packing:
        return Packing(self._limits, self._most_bytes, self._options, self._shared)

    def run(self, batch: Batch, waypoints: Waypoints | None = None) -> Flow[StepResult]:
        """Apply a batch: as arrays where nothing is out of the ordinary, else row by row. Raises as `step` does.

        waypoints: where each row, of PREFILL, leaves snapshots.
        """
        if not self._shared.is_off and self._shared.server.epoch != self._limits.server_epoch:
            yield from self._shared.ready(self._limits, self._attempts)
            self._attempts = self._client._attempts(self._options.get("timeout_s"))  # after a wait, all its time
        with Hold(Group.of(self._client, batch.sequences), self.span) as hold:
            if waypoints is not None or not self._is_ordinary(batch, hold):
                rows = batch.rows(hold.progress)
                if waypoints is not None:
                    for row in rows:
                        row.leave(waypoints, self._limits.waypoint_tokens)
                return (yield from self.run_rows(_with_unfinished(rows)))
            request = Request.of_batch(batch, hold)
            request.place(self._shared)
            message = request.message(self._options, self._most_reply_bytes)
            try:
                yield from self._first_round(request, message)
                if request.applied is not None:
                    return request.applied
                rows = [row for row, _ in request.rows()]
                yield from self._rounds(*(yield from self._rest(rows)))
            finally:
                if request.applied is None:
                    for row, _ in request.rows():
                        row.release()
        return self._gathered(rows)

    def run_rows(self, rows: list[RowProgress]) -> Flow[StepResult]:
        """Send steps of rows, whose progress the call holds, until each is over. Raises as `step` does."""
        try:
            for row in rows:
                row.error = None
                row.apply_replies()  # that came to a call which was interrupted before it noted them
            yield from self._rounds([row for row in rows if not row.is_over])
        finally:
            for row in rows:
                row.release()
        return self._gathered(rows)

    def _gathered(self, rows: Sequence[RowProgress]) -> StepResult:
        """The results of rows that are over. Raises: StepError; the error itself when nothing ran because of it."""
        results = tuple(map(RowResult.of, rows))
        if all(row.error is None for row in rows):
            return StepResult(results, StepTiming.of(self._timings))
        whole = self._request_error
        if whole is not None and all(row.error is whole and not row.tokens_done for row in rows):
            raise whole
        raise StepError(results)

    def _is_ordinary(self, batch: Batch, hold: Hold) -> bool:
        """Whether one request may carry all rows, and no row has an unfinished step."""
        limits = self._limits
        elements = int(batch.start[-1]) * math.prod(batch.input_shape)
        output_elements = int(batch.output_start[-1]) * math.prod(batch.output_shape)
        return (
            0 < len(batch.sequences) <= limits.max_sequences
            and max(elements, output_elements) * limits.dtype.itemsize <= self._most_bytes
            and (hold.is_plain or not np.count_nonzero(hold.numbers[UNFINISHED]))
            and hold.group.has_one_epoch
        )

    def _rounds(self, waiting: list[RowProgress], delay_s: float | None = None) -> Flow[None]:
        """Send what is left of rows, after a delay, until each is over."""
        while waiting:
            if delay_s is not None:
                yield Sleep(delay_s)
            if self._attempts.next_timeout_s() <= 0:
                self._request_error = DeadlineExceeded("the call's timeout is over")
                for row in waiting:
                    row.error = row.next_error or self._request_error
                return
            done_before = [row.tokens_done for row in waiting]
            whole = list(filter(self._packing.is_whole, waiting))
            if whole:  # they can't go inline
                yield from self._shared.ready(self._limits, self._attempts, whole[0].sequence._home.at)
            yield from self._round(self._packing.requests(waiting))
            waiting, delay_s = yield from self._rest(waiting, done_before)

    def _rest(
        self, rows: Sequence[RowProgress], done_before: Sequence[int] = ()
    ) -> Flow[tuple[list[RowProgress], float | None]]:
        """What a round left: the rows that are not over, and how long to wait before the next one, None for not at all.

        done_before: how many tokens of each row were applied before that round; none, if nothing.
        """
        for row in rows:
            row.apply_replies()
        errors = {row: row.next_error for row in rows}
        failed = {row: error for row, error in errors.items() if error is not None}
        yield from self._follow(failed)
        delay_s = self._attempts.delay_s(*(error.retry_after_s for error in failed.values()))
        for row, error in failed.items():
            is_rerouted = yield from rerouted(row.home.at, error)
            if delay_s is None or not (is_rerouted or self._may_retry(error)):
                row.error = error
        if sum(row.tokens_done for row in rows) > sum(done_before):
            self._attempts.progressed()
        return [row for row in rows if not row.is_over], delay_s if failed else None

    def _follow(self, failed: dict[RowProgress, DeltalineError]) -> Flow[None]:
        """Take out those rows whose sequences were moved, and are to be sent again to where they live now."""
        moved = []
        for row, error in failed.items():
            if (yield from followed(row.sequence, row.home, error)):
                moved.append(row)
        if moved and self._attempts.moved():
            for row in moved:
                del failed[row]

    def _first_round(self, request: Request, message: Sequence[Buffer]) -> Flow[None]:
        """The round of an ordinary batch, which is one request: as `_round`, without what several need."""
        self._last_number += 1
        timeout_s, answer = self._attempts.next_timeout_s(), None
        try:
            yield Send(self._last_number, message, request.at)
            answer = yield Receive(max(0.0, timeout_s))
        finally:
            if answer is None:
                request.end(self._shared)
        if answer is None:
            self._fail(request, DeadlineExceeded("no answer in time"))
        else:
            self._take(request, answer[1])

    def _round(self, requests: Iterator[Request]) -> Flow[None]:
        """Send requests, and gather the answers."""
        in_flight: dict[int, Request] = {}
        most, has_failed = requests_in_flight(self._limits), False
        try:
            while True:
                while not has_failed and len(in_flight) < most:
                    request = next(requests, None)
                    if request is None:
                        break
                    self._last_number += 1
                    in_flight[self._last_number] = request
                    # A mistake in it leaves the rows as they are.
                    message = request.message(self._options, self._most_reply_bytes)
                    request.begin()
                    yield Send(self._last_number, message, request.at)
                if not in_flight:
                    return
                answer = yield Receive(max(0.0, self._attempts.timeout_s()))
                if answer is None:
                    late = DeadlineExceeded("no answer in time")
                    for request in in_flight.values():
                        self._fail(request, late)
                    return
                request = in_flight.pop(answer[0], None)
                if request is not None:  # else the answer to an attempt that was given up
                    has_failed = not self._take(request, answer[1]) or has_failed
        finally:
            for request in in_flight.values():
                request.end(self._shared)

    def _take(self, request: Request, answer: Answer) -> bool:
        """Note what became of the rows of a request. Returns whether all were applied."""
        is_applied, error = False, answer if isinstance(answer, DeltalineError) else None
        try:
            if not isinstance(answer, DeltalineError):
                try:
                    outputs = request.read(answer)
                except ProtocolError as wrong:
                    error = wrong.with_traceback(None)  # which would hold the placement
                else:
                    is_applied = self._note(request, answer, outputs)
            if error is not None:
                self._fail(request, error)
        finally:
            if request.placement is not None:
                request.end(self._shared)
        return is_applied

    def _fail(self, request: Request, error: DeltalineError) -> None:
        """A request was refused whole, or not answered."""
        self._request_error = error
        for _, step in request.rows():
            step.error = error
            step.in_doubt = step.was_in_doubt or isinstance(error, TransportError)
        if request.placement is not None and isinstance(error, InvalidSharedMemory):
            self._shared.lost(request.placement, error)
        if isinstance(error, CapacityError | MessageTooLarge):
            self._packing.shorten(request.rows()[0][0])

    def _note(self, request: Request, answer: StepAnswer, outputs: Array) -> bool:
        """Note the answer to each row. Returns whether all were applied."""
        fields = answer.fields
        if fields.HasField("timing"):
            self._timings.append(fields.timing)
        # The caller gets outputs of its own, unless it takes them as they lie in shared memory.
        copies = answer.shared is None or self._options.get("copy", True)
        if request.advance(answer):
            request.applied = Applied(request.batch, outputs.copy() if copies else outputs, answer, self._timings)
            if request.placement is not None and copies:
                self._shared.spare(request.placement)
            return True
        rows = request.rows()
        first, first_step = rows[0]
        if copies and (first_step.count == len(first.hidden) or first.output != "all"):
            outputs = outputs.copy()  # those of a row that is cut are copied into their place
        statuses = {row.row: row.status for row in fields.row_status}
        start = np.frombuffer(answer.output_start_loc, "<u4").tolist()
        told = [Waypoint.from_proto(one) for one in fields.waypoints]
        for index, (_, step) in enumerate(rows):
            step.waypoints = [place for place, one in zip(told, fields.waypoints, strict=True) if one.row == index]
            if index in statuses:
                step.error = error = from_status(statuses[index])
                # A full server may refuse a resent step before it looks whether the first try was applied; another than
                # the one that holds the sequence can't know.
                step.in_doubt = step.was_in_doubt and isinstance(error, CapacityError | StateElsewhere)
            else:
                output = outputs[start[index] : start[index + 1]]
                step.reply = output, int(answer.position[index]), RowOutcome(answer.outcome[index])
                step.in_doubt = False
        for row, _ in rows:
            row.apply_replies()
        return not statuses

    def _may_retry(self, error: DeltalineError) -> bool:
        """Whether a row or request is sent again. A queue deadline that the caller set is final."""
        if isinstance(error, QueueDeadline) and self._options.get("queue_timeout_s"):
            return False
        return is_retryable(error) or isinstance(error, InvalidSharedMemory)


def _with_unfinished(rows: list[RowProgress]) -> list[RowProgress]:
    """The rows, with the unfinished one of its sequence in place of each that has one. Raises StepUnfinished."""
    for index, row in enumerate(rows):
        unfinished = row.progress.unfinished
        if unfinished is not None:
            if not unfinished.is_same_as(row):
                raise StepUnfinished(f"rows[{index}]: a step has an unknown outcome; resume it, or repeat that call")
            rows[index] = unfinished
    return rows
