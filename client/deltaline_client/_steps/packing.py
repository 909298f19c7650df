"""How rows share requests: which steps a round sends, and where their tensors lie.

Rows that fit a message go together, in shared memory where there is room. A row larger than a message goes as one step
in shared memory; without room for that a prefill is cut into steps, which travel in messages. A verify is one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from deltaline_client._exceptions import MessageTooLarge, SharedMemoryExhausted
from deltaline_client._shared_memory.regions import SharedMemory
from deltaline_client._steps.request import Request
from deltaline_client._steps.sequence import RowProgress, RowStep
from deltaline_client._types import ServerInfo, StepOptions

# Most bytes of the steps that a long row is cut into: smaller ones overlap transfer and compute better, larger ones
# cost fewer messages, each of which is milliseconds of work for both sides.
CHUNK_BYTES = 4 * 2**20
# Bytes of a call's requests in flight: half of what a server takes of a stream, so that others' steps pass beside them.
WINDOW_BYTES = 16 * 2**20


def requests_in_flight(limits: ServerInfo) -> int:
    """How many requests of a call are on their way at once: as many as the server takes and the window holds."""
    window = WINDOW_BYTES // min(CHUNK_BYTES, max(1, limits.inline_limit_bytes))
    return max(1, min(limits.max_steps_in_flight, window))


class Packing:
    """Makes the requests of one call's rows."""

    def __init__(self, limits: ServerInfo, most_bytes: int, options: StepOptions, shared: SharedMemory) -> None:
        """most_bytes: of a tensor in a message, as far as the server and what carries it go."""
        self._limits, self._shared = limits, shared
        # Long rows that the server has refused as one step.
        self._too_long: set[RowProgress] = set()
        # A message carries so many tokens, the request their hidden states and the reply their outputs.
        span = options.get("span", 0)
        row_bytes = max(map(math.prod, (limits.input_shape(span), limits.output_shape(span)))) * limits.dtype.itemsize
        self._limit = max(1, most_bytes // row_bytes)
        self._chunk = max(1, min(CHUNK_BYTES, most_bytes) // row_bytes)

    def is_whole(self, row: RowProgress) -> bool:
        """Whether the row's next step is larger than a message: the whole of a long row."""
        return bool(row.steps) and row.steps[0].count > self._limit

    def _goes_with_others(self, row: RowProgress) -> bool:
        """Whether all its tokens are one step that shares a message; the steps of a row with places may be several."""
        return len(row.hidden) <= self._limit and row.places is None

    def shorten(self, row: RowProgress) -> None:
        """The server was too full for a row's request, or takes none so large: a long row's only step is cut."""
        if self.is_whole(row) and not row.steps[0].in_doubt and not row.is_one_step:
            self._too_long.add(row)
            row.uncut()

    def requests(self, waiting: Sequence[RowProgress]) -> Iterator[Request]:
        """The requests of a round: rows that fit a message; long rows whole; a step of each of the others in turn."""
        for row in waiting:
            row.home = row.sequence._home
        waiting = sorted(waiting, key=lambda row: row.home.at)  # a request is of one server
        for steps in self._messages(waiting):
            yield self._request(steps)
        cut: list[tuple[RowProgress, Iterator[RowStep]]] = []
        for row in waiting:
            if not self._goes_with_others(row):
                whole = self._whole(row)
                if whole is not None:
                    yield whole
                elif not self.is_whole(row):
                    cut.append((row, self._steps(row)))
        while cut:
            for turn in list(cut):
                row, steps_left = turn
                step = next(steps_left, None)
                if step is None:
                    cut.remove(turn)
                elif step.count == len(row.hidden):
                    yield self._request([(row, step)])
                else:  # in a message: several are in flight, and of those in shared memory the last reply alone is kept
                    yield Request.of_steps([(row, step)])

    def _request(self, steps: Sequence[tuple[RowProgress, RowStep]]) -> Request:
        """A request of whole rows, in shared memory if it can be."""
        request = Request.of_steps(steps)
        request.place(self._shared)
        return request

    def _whole(self, row: RowProgress) -> Request | None:
        """The only step of a long row, in shared memory. None when it is cut, or has to be: something is full.

        A step that has been sent whole and may have been applied stays as it is, with an error while it can't be sent;
        so does a verify, whether it has been sent or not.
        """
        if not row.steps and not row.tokens_cut and row not in self._too_long:
            row.cut(len(row.hidden))
        if not self.is_whole(row):
            return None
        step = row.steps[0]
        request = self._request([(row, step)])
        if request.placement is not None:
            return request
        if step.in_doubt:
            step.error = SharedMemoryExhausted(
                "the step was sent in shared memory, which has no room to send it again", retry_after_s=0.0
            )
        elif not row.is_one_step:
            row.uncut()
        elif self._shared.is_off:
            most = f"a message holds {self._limit} of {len(row.hidden)} tokens"
            step.error = MessageTooLarge(f"hidden: {most}, and a verify is one step; shared memory would hold it")
        else:
            step.error = SharedMemoryExhausted(
                "a verify that is larger than a message finds no room in shared memory", retry_after_s=0.0
            )
        return None

    def _messages(self, waiting: Sequence[RowProgress]) -> Iterator[list[tuple[RowProgress, RowStep]]]:
        """The rows that fit a message, in order, as many together as do."""
        steps, budget = list[tuple[RowProgress, RowStep]](), self._limit
        for row in waiting:
            count = len(row.hidden)
            if not self._goes_with_others(row):
                continue
            if steps and (
                count > budget
                or len(steps) == self._limits.max_sequences
                or row.output != steps[0][0].output
                or row.home.at != steps[0][0].home.at
            ):
                yield steps
                steps, budget = [], self._limit
            steps.append((row, row.steps[0] if row.steps else row.cut(count - row.tokens_cut)))
            budget -= count
        if steps:
            yield steps

    def _steps(self, row: RowProgress) -> Iterator[RowStep]:
        """The steps of a long row that are to be sent: those cut before and not answered, then new ones."""
        yield from [step for step in row.steps if step.reply is None]
        while row.tokens_cut < len(row.hidden) and row.lost is None:
            yield row.cut(min(self._chunk, len(row.hidden) - row.tokens_cut))
