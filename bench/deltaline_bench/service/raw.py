"""Raw streams: steps whose bytes are made before the clock starts, and echoes of the same bytes beside them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
import numpy as np

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_bench.service.echo import METHOD as ECHO
from deltaline_bench.service.host import hidden_states
from deltaline_client import AsyncClient

STEP_STREAM = "/deltaline.v1.LayerService/StepStream"
MAX_MESSAGE_BYTES = 64 << 20


class RawError(RuntimeError):
    """The server refused a step of a raw stream."""


@dataclass(frozen=True)
class Times:
    """Seconds of one decode step, seen by the raw stream, and the server's stages in its reply."""

    total_s: float
    queue_s: float
    copy_in_s: float
    compute_s: float
    copy_out_s: float

    @property
    def outside_s(self) -> float:
        """What is in no stage: both ends' gRPC and the service's own work."""
        return self.total_s - self.queue_s - self.copy_in_s - self.compute_s - self.copy_out_s


class RawStream:
    """A stream of messages in raw bytes, one at a time. `async with` opens and ends it."""

    def __init__(self, address: str, method: str) -> None:
        self._address, self._method = address, method

    async def __aenter__(self) -> Self:
        options = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("send", "receive")]
        self._channel = grpc.aio.insecure_channel(self._address, options=options)
        self.call: Any = self._channel.stream_stream(self._method)()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.call.cancel()
        await self._channel.close()

    async def exchange(self, message: bytes) -> tuple[bytes, float]:
        """Send a message and wait for the next one; return it, and the seconds that it took."""
        begin_s = time.perf_counter()
        await self.call.write(message)
        reply: bytes = await self.call.read()
        return reply, time.perf_counter() - begin_s


def echoes(address: str) -> RawStream:
    """Make a stream to the bare echo."""
    return RawStream(address, ECHO)


class DecodeStream(RawStream):
    """Decode steps of the same sequences over StepStream."""

    def __init__(self, address: str, epoch: int, handles: list[int], hidden: Any) -> None:
        """handles: fresh sequences. hidden [rows, hidden size], what every step carries."""
        super().__init__(address, STEP_STREAM)
        self._epoch, self._handles = epoch, handles
        number = pb.StepRequest.HIDDEN_FIELD_NUMBER
        self._tensor = b"".join(wire.field_pieces(number, wire.tensor_pieces(hidden)))
        self._step = 0

    def next_message(self) -> bytes:
        """The bytes of the next step."""
        self._step += 1
        rows = len(self._handles)
        arrays = pb.StepRequest(
            server_epoch=self._epoch,
            sequence=self._handles,
            kind=[pb.ROW_KIND_DECODE] * rows,
            step=[self._step] * rows,
            position=[self._step - 1] * rows,
            accepted=[-1] * rows,
            query_start_loc=range(rows + 1),
        ).SerializeToString()
        head = pb.StepStreamRequest(correlation_id=self._step).SerializeToString()
        step = wire.field_pieces(pb.StepStreamRequest.STEP_FIELD_NUMBER, [arrays, self._tensor])
        return b"".join([head, *step])

    async def step(self, message: bytes) -> Times:
        """Make the step of `next_message`. Raises RawError when the server refused it."""
        answer, total_s = await self.exchange(message)
        response = pb.StepStreamResponse.FromString(answer)
        rows = response.step
        if response.WhichOneof("result") != "step" or rows.row_status or len(rows.outcome) != len(self._handles):
            raise RawError(f"a step was refused: {str(response.status or rows.row_status)[:500]}")
        timing = rows.timing
        stages = (timing.queue_ns, timing.copy_in_ns, timing.compute_ns, timing.copy_out_ns)
        return Times(total_s, *(nanoseconds * 1e-9 for nanoseconds in stages))


@asynccontextmanager
async def decoding(client: AsyncClient, address: str, rows: int) -> AsyncIterator[DecodeStream]:
    """A stream of decode steps of so many fresh sequences, which the client opens before and closes afterwards."""
    hidden = await hidden_states(client, rows)
    sequences = await client.open_many(rows)
    handles = [sequence.handle for sequence in sequences]
    async with DecodeStream(address, sequences[0].server_epoch, handles, hidden) as stream:
        yield stream
    await client.close(sequences)


def percentile_us(seconds: list[float], percentile: float) -> float:
    """A percentile in microseconds."""
    return float(np.percentile(seconds, percentile)) * 1e6
