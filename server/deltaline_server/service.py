"""LayerService: sequences and their steps over gRPC.

Knows protobuf messages and who answers them. Does not know policy (scheduler.py, sequences.py), the device, nor how
errors reach the client (interceptor.py). A handler only waits for work: an RPC that is cancelled cancels nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc

from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server import reply, request
from deltaline_server.errors import RequestError
from deltaline_server.interceptor import Context, bug, empty_frames
from deltaline_server.observer import Observer
from deltaline_server.request import RequestLimits
from deltaline_server.scheduler import Scheduler
from deltaline_server.sequences import SequenceTable
from deltaline_server.step import StepRequest, StepResult
from deltaline_server.step_message import StepMessage, StreamStep, parse_step, parse_stream_step
from deltaline_server.stream_room import StreamRoom

NAME = pb.DESCRIPTOR.services_by_name["LayerService"].full_name
# Steps of a stream that are taken and whose replies are not written, and bytes of their tensors: they bound what a fast
# writer or a slow reader makes the server hold. Four steps of the largest inline tensor by default.
STREAM_STEPS = 64
STREAM_BYTES = 16 * 2**20


class LayerService:
    """The handlers of LayerService. They take parsed messages and return serialised replies."""

    def __init__(
        self,
        *,
        table: SequenceTable,
        scheduler: Scheduler,
        limits: RequestLimits,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        """`observer` counts what streams refuse; `clock` is the scheduler's: monotonic seconds."""
        self._table, self._scheduler, self._limits = table, scheduler, limits
        self._observer, self._clock = observer, clock
        self._stream_readers: set[asyncio.Task[None]] = set()

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a grpc.aio server registers."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            NAME,
            {
                "OpenSequences": unary(self.open_sequences, pb.OpenSequencesRequest.FromString),
                "CloseSequences": unary(self.close_sequences, pb.CloseSequencesRequest.FromString),
                "DescribeSequences": unary(self.describe_sequences, pb.DescribeSequencesRequest.FromString),
                "RenewLeases": unary(self.renew_leases, pb.RenewLeasesRequest.FromString),
                "Step": unary(self.step, parse_step),
                "CommitSequences": unary(self.commit_sequences, pb.CommitSequencesRequest.FromString),
                "StepStream": grpc.stream_stream_rpc_method_handler(self.step_stream, parse_stream_step),
            },
        )

    async def open_sequences(self, message: pb.OpenSequencesRequest, context: Context) -> bytes:
        """Open sequences."""
        self._scheduler.settle()  # it may end sequences, whose lines are free then
        count = request.read_count(message, self._limits)
        lease_s = request.read_lease_s(message.lease_ms, self._limits)
        handles, lease_s = self._table.open(count, lease_s, message.open_token)
        response = pb.OpenSequencesResponse(
            server_epoch=self._table.server_epoch, sequence=handles.tolist(), lease_ms=round(lease_s * 1000)
        )
        return response.SerializeToString()

    async def close_sequences(self, message: pb.CloseSequencesRequest, context: Context) -> bytes:
        """End sequences."""
        self._scheduler.settle()
        epoch = request.read_epoch(message.server_epoch)
        states = self._table.close(epoch, request.read_handles(message.sequence, self._limits))
        return reply.close_response(states)

    async def describe_sequences(self, message: pb.DescribeSequencesRequest, context: Context) -> bytes:
        """Tell what is held."""
        self._scheduler.settle()
        epoch = request.read_epoch(message.server_epoch)
        handles = request.read_handles(message.sequence, self._limits)
        return reply.describe_response(handles, self._table.describe(epoch, handles))

    async def renew_leases(self, message: pb.RenewLeasesRequest, context: Context) -> bytes:
        """Move lease deadlines."""
        epoch = request.read_epoch(message.server_epoch)
        handles = request.read_handles(message.sequence, self._limits)
        states = self._table.renew(epoch, handles, request.read_lease_s(message.lease_ms, self._limits))
        return reply.renew_response(states)

    async def step(self, message: StepMessage, context: Context) -> bytes:
        """Apply one step. The work goes on, and its reply is kept, whatever becomes of this RPC."""
        return reply.step_response(await self._submit(message, context))

    async def commit_sequences(self, message: pb.CommitSequencesRequest, context: Context) -> bytes:
        """Fix accepted counts."""
        self._scheduler.settle()
        commit = request.read_commit(message, self._limits)
        return reply.commit_response(
            *self._table.commit(commit.server_epoch, commit.span, commit.handle, commit.step, commit.accepted)
        )

    async def step_stream(self, messages: AsyncIterator[StreamStep], context: Context) -> AsyncIterator[bytes]:
        """Apply steps as they come and answer each when it is done.

        At most STREAM_STEPS with STREAM_BYTES are taken and not answered; beyond that the stream is not read, and
        gRPC's flow control holds the client. A message that can't be parsed ends the stream once the steps before it
        are answered; so does `end_streams`.
        """
        answers: asyncio.Queue[tuple[int, int, StepResult | BaseException] | None] = asyncio.Queue()
        room = StreamRoom(STREAM_STEPS, STREAM_BYTES)
        num_taken = 0

        def answer(correlation_id: int, num_bytes: int, done: asyncio.Future[StepResult]) -> None:
            answers.put_nowait((correlation_id, num_bytes, done.exception() or done.result()))

        async def take() -> None:
            nonlocal num_taken
            try:
                async for message in messages:
                    step = self._read_safely(message.step, context)
                    # A refusal's traceback holds the message until its answer is written.
                    inline = message.step.inline or b""
                    num_bytes = step.message_bytes if isinstance(step, StepRequest) else len(inline)
                    await room.take(num_bytes)
                    num_taken += 1
                    future = self._submit_safely(step)
                    future.add_done_callback(partial(answer, message.correlation_id, num_bytes))
                    # Nothing of a step is held while the stream waits: it may lie in memory to be unmapped.
                    del message, step, future
            finally:
                answers.put_nowait(None)

        reader = asyncio.create_task(take())
        self._stream_readers.add(reader)
        num_answered, is_over = 0, False
        try:
            while not (is_over and num_answered == num_taken):
                answered = await answers.get()
                if answered is None:
                    is_over = True
                else:
                    correlation_id, num_bytes, result = answered
                    yield self._stream_response(correlation_id, result)  # goes on when gRPC has taken the reply
                    num_answered += 1
                    room.give(num_bytes)
                    del answered, result  # as in take()
            await asyncio.wait((reader,))
            if not reader.cancelled():
                reader.result()
        finally:
            self._stream_readers.discard(reader)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def end_streams(self) -> None:
        """Take no more steps from streams; each ends once those that it has taken are answered."""
        for reader in self._stream_readers:
            reader.cancel()

    def _read(self, message: StepMessage, context: Context) -> StepRequest:
        """Check a step. Raises: RequestError."""
        return request.read_step(
            message,
            self._limits,
            now_s=self._clock(),
            remaining_s=context.time_remaining(),
            client=context.peer(),
        )

    def _submit(self, message: StepMessage, context: Context) -> asyncio.Future[StepResult]:
        """Check a step and hand it to the scheduler. Raises: RequestError; then nothing was taken."""
        return self._scheduler.submit(self._read(message, context))

    def _read_safely(self, message: StepMessage, context: Context) -> StepRequest | Exception:
        """As `_read`, but what it raises is returned."""
        try:
            return self._read(message, context)
        except Exception as error:
            return error

    def _submit_safely(self, step: StepRequest | Exception) -> asyncio.Future[StepResult]:
        """Hand a step to the scheduler; what that raises, or what is given in place of a step, is in the future."""
        try:
            if isinstance(step, Exception):
                raise step
            return self._scheduler.submit(step)
        except Exception as error:
            failed: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
            if isinstance(error, RequestError):  # a future keeps the traceback, and by this frame itself
                empty_frames(error)
                error.__traceback__ = None
            failed.set_exception(error)
            return failed

    def _stream_response(self, correlation_id: int, answer: StepResult | BaseException) -> bytes:
        """The message that answers one step of a stream."""
        if isinstance(answer, StepResult):
            return reply.stream_response(correlation_id, answer)
        refusal = answer.refusal if isinstance(answer, RequestError) else bug(answer)
        self._observer.refused(refusal.reason, 1)
        return reply.stream_status(correlation_id, refusal)
