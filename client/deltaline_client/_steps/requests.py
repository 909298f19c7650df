"""Requests: which steps a round sends, how rows share them, and where their tensors lie. Sends nothing.

Rows that fit a message go together, in shared memory where there is room. A row larger than a message goes as one step
in shared memory; without room for that a prefill is cut into steps, which travel in messages. A verify is one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client._arrays import Array
from deltaline_client._exceptions import MessageTooLarge, SharedMemoryExhausted
from deltaline_client._shared_memory.regions import Placement, SharedMemory
from deltaline_client._steps.sequence import Job, Part
from deltaline_client._transport.messages import shared_step_request, step_request
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


OUTPUT_ROWS = {"all": layers.OUTPUT_ROWS_ALL, "last": layers.OUTPUT_ROWS_LAST, "none": layers.OUTPUT_ROWS_NONE}

Wave: TypeAlias = list[tuple[Job, Part]]
"""The rows of one request."""


@dataclass(frozen=True)
class Sent:
    """A request as it was sent: its rows, and where its tensors lie; None for in the message."""

    wave: Wave
    placement: Placement | None


def request_fields(server_epoch: int, options: StepOptions, **columns: Any) -> layers.StepRequest:
    """A StepRequest but for its tensor: what the options say, and the columns of its rows."""
    return layers.StepRequest(
        server_epoch=server_epoch,
        span=options.get("span", 0),
        priority=options.get("priority", 0),
        queue_timeout_us=round((options.get("queue_timeout_s") or 0.0) * 1e6),
        **columns,
    )


def message(
    fields: layers.StepRequest, hidden: Sequence[Array], placement: Placement | None
) -> list[bytes | memoryview]:
    """A serialised StepRequest in pieces: its fields, and packed rows, each [n, *token shape], or where they lie."""
    if placement is None:
        return step_request(fields, hidden if len(hidden) == 1 else [np.concatenate(hidden)])
    fields.output_slice.CopyFrom(placement.output_slice())
    return shared_step_request(fields, placement.tensor())


class Requests:
    """Makes the requests of one call's jobs."""

    def __init__(self, limits: ServerInfo, options: StepOptions, shared: SharedMemory) -> None:
        self._limits, self._options, self._shared = limits, options, shared
        # Long rows that the server has refused as one step.
        self._too_long: set[Job] = set()
        # A message carries so many tokens, the request their hidden states and the reply their outputs.
        span = options.get("span", 0)
        row_bytes = max(map(math.prod, (limits.input_shape(span), limits.output_shape(span)))) * limits.dtype.itemsize
        self._limit = max(1, limits.inline_limit_bytes // row_bytes)
        self._chunk = max(1, min(CHUNK_BYTES, limits.inline_limit_bytes) // row_bytes)

    def is_whole(self, part: Part) -> bool:
        """Whether a step is larger than a message: the whole of a long row."""
        return part.count > self._limit

    def shorten(self, sent: Sent) -> None:
        """The server was too full for a request, or takes none so large: a long row's only step is cut."""
        job, part = sent.wave[0]
        if self.is_whole(part) and not part.in_doubt and not job.is_one_step:
            self._too_long.add(job)
            job.uncut()

    def of(self, waiting: Sequence[Job]) -> Iterator[Sent]:
        """The requests of a round: rows that fit a message; long rows whole; a step of each of the others in turn."""
        for wave in self._waves(waiting):
            yield Sent(wave, self._place(wave))
        cut: list[tuple[Job, Iterator[Part]]] = []
        for job in waiting:
            if len(job.hidden) > self._limit:
                whole = self._whole(job)
                if whole is not None:
                    yield whole
                elif not job.parts or not self.is_whole(job.parts[0]):
                    cut.append((job, self._steps(job)))
        while cut:
            for turn in list(cut):
                job, steps = turn
                step = next(steps, None)
                if step is None:
                    cut.remove(turn)
                else:
                    yield Sent([(job, step)], None)

    def _whole(self, job: Job) -> Sent | None:
        """The only step of a long row, in shared memory. None when it is cut, or has to be: something is full.

        A step that has been sent whole and may have been applied stays as it is, with an error while it can't be sent;
        so does a verify, whether it has been sent or not.
        """
        if not job.parts and not job.tokens_cut and job not in self._too_long:
            job.cut(len(job.hidden))
        if not job.parts or not self.is_whole(job.parts[0]):
            return None
        part = job.parts[0]
        placement = self._place([(job, part)])
        if placement is not None:
            return Sent([(job, part)], placement)
        if part.in_doubt:
            part.error = SharedMemoryExhausted(
                "the step was sent in shared memory, which has no room to send it again", retry_after_s=0.0
            )
        elif not job.is_one_step:
            job.uncut()
        elif self._shared.is_off:
            most = f"the server takes {self._limit} of {len(job.hidden)} tokens in a message"
            part.error = MessageTooLarge(f"hidden: {most}, and a verify is one step; shared memory would hold it")
        else:
            part.error = SharedMemoryExhausted(
                "a verify that is larger than a message finds no room in shared memory", retry_after_s=0.0
            )
        return None

    def _waves(self, waiting: Sequence[Job]) -> Iterator[Wave]:
        """The rows that fit a message, in order, as many together as do."""
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

    def _steps(self, job: Job) -> Iterator[Part]:
        """The steps of a long row that are to be sent: those cut before, then new ones."""
        yield from list(job.parts)
        while job.tokens_cut < len(job.hidden) and job.lost is None:
            yield job.cut(min(self._chunk, len(job.hidden) - job.tokens_cut))

    def _place(self, wave: Wave) -> Placement | None:
        """Put a request's tensors into shared memory, if it can be.

        The steps of a row that is cut stay out: several are in flight, and of those there only the last reply is kept.
        """
        job, part = wave[0]
        if part.count < len(job.hidden):
            return None
        num_outputs = {"all": sum(part.count for _, part in wave), "last": len(wave), "none": 0}[job.output]
        rows, hidden = tuple(part for _, part in wave), [job.hidden for job, _ in wave]
        return self._shared.place(rows, hidden, (num_outputs, *job.output_shape))

    def message(self, sent: Sent) -> list[bytes | memoryview]:
        """The serialised StepRequest of a wave, in pieces."""
        wave = sent.wave
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
            output=OUTPUT_ROWS[job.wanted(part)],
        )
        hidden = [job.hidden[part.start : part.start + part.count] for job, part in wave]
        return message(fields, hidden, sent.placement)
