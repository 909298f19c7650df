"""Raw calls: steps whose bytes are made before the clock starts, and echoes of the same bytes beside them."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from deltaline import wire
from deltaline.tls import channel_of
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_cli.bench.loop import Step, closed_loop
from deltaline_cli.bench.samples import Sample, Samples, sample
from deltaline_client import AsyncClient, Tls

Way = Literal["unary", "stream"]
"""A call for each message, or a stream that stays open."""

METHODS: dict[Way, str] = {
    "unary": "/deltaline.v1.LayerService/Step",
    "stream": "/deltaline.v1.LayerService/StepStream",
}
MAX_MESSAGE_BYTES = 64 << 20
WARM_UP = 20


class RawError(RuntimeError):
    """The server refused a raw step."""


class RawCalls:
    """Messages in raw bytes to one method, one at a time. `async with` opens and ends the connection."""

    def __init__(self, address: str, way: Way, method: str, tls: Tls | None = None, token: str | None = None) -> None:
        self._address, self._way, self._method, self._tls = address, way, method, tls
        self._metadata = None if token is None else (("authorization", f"Bearer {token}"),)

    async def __aenter__(self) -> Self:
        options = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("send", "receive")]
        self._channel = channel_of(grpc.aio, self._address, self._tls, options)
        self._unary: Any = self._channel.unary_unary(self._method)
        self.stream: Any = (
            self._channel.stream_stream(self._method)(metadata=self._metadata) if self._way == "stream" else None
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.cancel()
        await self._channel.close()

    async def exchange(self, message: bytes) -> tuple[bytes, float, float]:
        """Send a message and wait for the answer; return it, and when the one was sent and the other there."""
        sent_s = time.monotonic()
        if self.stream is None:
            reply: bytes = await self._unary(message, metadata=self._metadata)
        else:
            await self.stream.write(message)
            reply = await self.stream.read()
        return reply, sent_s, time.monotonic()


class DecodeSteps(RawCalls):
    """Decode steps of the same sequences, one row each. message: the bytes of the last step."""

    message = b""

    def __init__(
        self,
        address: str,
        way: Way,
        server_epoch: int,
        handles: list[int],
        hidden: Any,
        tls: Tls | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__(address, way, METHODS[way], tls, token)
        self.server_epoch, self._handles, self._step = server_epoch, handles, 0
        tensor = wire.encode(hidden).SerializeToString()
        # Field by field, as protobuf lets a message be put together: the step's own fields, then its hidden states.
        self._tensor = b"".join(wire.field_pieces(pb.StepRequest.HIDDEN_FIELD_NUMBER, [tensor]))

    def next_message(self) -> bytes:
        """The bytes of the next step."""
        self._step += 1
        rows = len(self._handles)
        arrays = pb.StepRequest(
            server_epoch=self.server_epoch,
            sequence=self._handles,
            kind=[pb.ROW_KIND_DECODE] * rows,
            step=[self._step] * rows,
            position=[self._step - 1] * rows,
            accepted=[-1] * rows,
            query_start_loc=range(rows + 1),
            max_reply_bytes=MAX_MESSAGE_BYTES,
        ).SerializeToString()
        if self._way == "unary":
            return arrays + self._tensor
        head = pb.StepStreamRequest(correlation_id=self._step).SerializeToString()
        step = wire.field_pieces(pb.StepStreamRequest.STEP_FIELD_NUMBER, [arrays, self._tensor])
        return b"".join([head, *step])

    async def step(self) -> Sample:
        """Make the next step. Raises RawError when the server refused it."""
        response, sent_s, done_s = await self._answer()
        timing = response.timing
        stages = (timing.queue_ns, timing.copy_in_ns, timing.compute_ns, timing.copy_out_ns)
        return sample("decode", len(self._handles), sent_s, done_s, [ns * 1e-9 for ns in stages])

    async def step_with_outputs(self) -> Sample:
        """The same, done only when protobuf has parsed the reply and the bytes of its outputs are taken."""
        response, sent_s, _ = await self._answer()
        np.frombuffer(response.hidden.inline, np.uint8)
        return sample("decode", len(self._handles), sent_s, time.monotonic())

    async def _answer(self) -> tuple[pb.StepResponse, float, float]:
        """Make the next step; return the answer, and when the one was sent and the other there. Raises RawError."""
        self.message = self.next_message()
        answer, sent_s, done_s = await self.exchange(self.message)
        if self._way == "unary":
            response, status = pb.StepResponse.FromString(answer), None
        else:
            streamed = pb.StepStreamResponse.FromString(answer)
            response, status = streamed.step, streamed.status
        if response.row_status or len(response.outcome) != len(self._handles):
            raise RawError(f"a step was refused: {str(response.row_status or status)[:500]}")
        return response, sent_s, done_s


@asynccontextmanager
async def decoding(
    address: str, rows: int, way: Way = "stream", tls: Tls | None = None, token: str | None = None
) -> AsyncIterator[DecodeSteps]:
    """Decode steps of so many fresh sequences, which are closed afterwards."""
    async with AsyncClient(address, tls=tls, token=token) as client:
        info = await client.info()
        hidden = np.random.default_rng(0).standard_normal((rows, info.hidden_size), dtype=np.float32)
        sequences = await client.open_many(rows)
        handles = [sequence.handle for sequence in sequences]
        epoch = sequences[0].server_epoch
        async with DecodeSteps(address, way, epoch, handles, hidden.astype(info.dtype), tls, token) as steps:
            yield steps
        await client.close(sequences)


@asynccontextmanager
async def echoing(
    address: str, way: Way, steps: DecodeSteps, *, around_layer: bool = False, tls: Tls | None = None
) -> AsyncIterator[Step]:
    """A step that has the message of the last decode step echoed. around_layer: by an echo that computes the layer
    in between, and tells how long that took."""
    async with RawCalls(address, way, f"/bare.Echo/{way}{'-around-layer' * around_layer}", tls) as calls:

        async def step() -> Sample:
            answer, sent_s, done_s = await calls.exchange(steps.message)
            compute_s = struct.unpack("d", answer[:8])[0] if around_layer else 0.0
            return sample("decode", 0, sent_s, done_s, (0.0, 0.0, compute_s, 0.0))

        yield step


async def measured(*steps: Step, rounds: int, warm_up: int = WARM_UP) -> list[Samples]:
    """Make the steps in turns, and then so many rounds that count; return the samples of each."""
    async for _ in closed_loop(steps, counting(warm_up)):
        pass
    turns = [turn async for turn in closed_loop(steps, counting(rounds))]
    return [window(list(rows)) for rows in zip(*turns, strict=True)]


def counting(rounds: int) -> Callable[[], bool]:
    """What is true so many times."""
    left = iter(range(rounds))
    return lambda: next(left, None) is not None


def window(rows: list[Sample], begin_s: float = -math.inf, end_s: float = math.inf) -> Samples:
    """Samples of steps, those that were due in the time."""
    return Samples.of(rows, begin_s, end_s, [], 0.0)


def besides_compute(samples: Samples) -> NDArray[np.float64]:
    """Seconds of each step less those in which its layers were computed."""
    stages = samples.stages_s("decode")
    return stages["total"] - stages["compute"]


def percentile_us(seconds: NDArray[np.float64] | list[float], percentile: float) -> float:
    """A percentile in microseconds; NaN where there is nothing."""
    return float(np.nanpercentile(seconds, percentile)) * 1e6 if len(seconds) else math.nan
