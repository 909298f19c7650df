"""Step and StepStream: how a step comes in, and how it is answered. A cancelled RPC cancels no work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.finite import LARGE_BYTES, FiniteCheck
from deltaline_server.front import replies, requests
from deltaline_server.front.flow_control import SharedBudget, StreamWindow
from deltaline_server.front.identity import Identity
from deltaline_server.front.interceptor import Context, bug, empty_frames
from deltaline_server.front.requests import Served
from deltaline_server.front.steps.step_message import StepMessage, StreamStep
from deltaline_server.front.trust.guesses import Guesses
from deltaline_server.front.trust.principals import Principals, current_principal
from deltaline_server.front.trust.refusals import Refusals
from deltaline_server.front.trust.turns import Turns
from deltaline_server.principal import Principal
from deltaline_server.scheduling.observer import Observer
from deltaline_server.scheduling.scheduler import GRPC_REPLY_TURNS, Scheduler
from deltaline_server.step import StepRequest, StepResult
from deltaline_server.tables.sequences import SequenceTable

if TYPE_CHECKING:
    from deltaline_server.telemetry.tracing import CallSpan, Tracing  # OpenTelemetry may not be installed

STEP_STREAM = f"/{pb.DESCRIPTOR.services_by_name['LayerService'].full_name}/StepStream"
# Steps of a stream that are taken and whose replies are not written, and bytes of their tensors: they bound what a fast
# writer or a slow reader makes the server hold. Eight steps of the largest inline tensor by default.
STREAM_STEPS = 64
STREAM_BYTES = 32 * 2**20
# Of all streams together: of many that nobody reads, each costs one step beyond this.
ALL_STREAMS_BYTES = 8 * STREAM_BYTES


class Stepping:
    """The handlers of Step and StepStream, and what all streams hold together."""

    def __init__(
        self,
        *,
        table: SequenceTable,
        scheduler: Scheduler,
        served: Served,
        identity: Identity,
        guesses: Guesses,
        observer: Observer,
        principals: Principals,
        refusals: Refusals,
        turns: Turns,
        clock: Callable[[], float],
        tracing: Tracing | None,
    ) -> None:
        """The arguments are those of LayerService, whose guesses they are."""
        self._table, self._scheduler, self._served, self._identity = table, scheduler, served, identity
        self._guesses, self._observer, self._turns = guesses, observer, turns
        self._principals, self._refusals, self._clock, self._tracing = principals, refusals, clock, tracing
        self._budget = SharedBudget(ALL_STREAMS_BYTES)
        self._finite_check = FiniteCheck()
        self._stream_readers: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """End its threads; after the last call."""
        self._finite_check.close()

    def end_streams(self) -> None:
        """Take no more steps from streams; each ends once those that it has taken are answered."""
        for reader in self._stream_readers:
            reader.cancel()

    async def step(self, message: StepMessage, context: Context) -> replies.Pieces:
        """Apply one step. The work goes on, and its reply is kept, whatever becomes of this RPC."""
        done: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        step = requests.read_step(
            message,
            self._served,
            now_s=self._clock(),
            until_s=self._until_s(context),
            principal=current_principal(),
            client=context.peer(),
        )
        if step.form.server_epoch != self._table.server_epoch:
            self._identity.judge(step, context)
        if self._guesses.is_slowing:
            self._guesses.check(step.client, step.principal)
        client, principal = step.client, step.principal
        if step.hidden.nbytes >= LARGE_BYTES:
            await self._examine(step)
        if self._tracing is not None:
            self._tracing.take(step)
        self._scheduler.submit(step, partial(_complete, done), _reply_turns(context))
        del message, step  # it may lie in memory to be unmapped
        result = await done
        if self._tracing is not None:
            self._tracing.tell(result)
        if result.refusals:
            self._guesses.add(client, principal, num_unknown(result.refusals))
        return replies.step_response(result)

    async def step_stream(self, messages: AsyncIterator[StreamStep], context: Context) -> AsyncIterator[replies.Pieces]:
        """Apply steps as they come and answer each when it is done.

        At most STREAM_STEPS with STREAM_BYTES are taken and not answered, or one where all streams hold
        ALL_STREAMS_BYTES, or those of its principal their share; beyond that the stream is not read, and gRPC's flow
        control holds the client. A message that can't be parsed, or is too large, ends the stream once the steps before
        it are answered; so does `end_streams`.
        """
        stream = _Stream(context, self._budget, self._until_s(context), self._refusals, self._principals.generation)
        begin_span = None
        if self._tracing is not None:
            begin_span = self._tracing.begin_stream(STEP_STREAM, context.invocation_metadata())
        reader = asyncio.create_task(self._take(stream, messages, context, begin_span))
        reader.add_done_callback(_empty_reader)
        self._stream_readers.add(reader)
        num_answered, is_over = 0, False
        try:
            while not (is_over and num_answered == stream.num_taken):
                answered = await stream.answers.get()
                if answered is None:
                    is_over = True
                else:
                    correlation_id, num_bytes, result = answered
                    # Goes on when gRPC has taken the reply.
                    yield self._stream_response(correlation_id, result, stream)
                    num_answered += 1
                    stream.window.release(num_bytes)
                    del answered, result  # as in _take()
            await asyncio.wait((reader,))
            if not reader.cancelled():
                reader.result()
        finally:
            self._stream_readers.discard(reader)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            stream.window.close()

    async def _take(
        self,
        stream: _Stream,
        messages: AsyncIterator[StreamStep],
        context: Context,
        begin_span: Callable[[bytes], CallSpan] | None,
    ) -> None:
        """Hand a stream's steps to the scheduler while its window has room; then None is the last of its answers.

        begin_span: of a step with this traceparent; None where nothing is traced.
        """
        reply_turns = _reply_turns(context)
        try:
            async for message in messages:
                if stream.generation != self._principals.generation:  # what was taken before is answered
                    stream.generation = self._principals.generation
                    stream.belong_to(self._principals.admit(STEP_STREAM, context) or stream.principal)
                span = None if begin_span is None else begin_span(message.traceparent)
                step = self._read_safely(message.step, stream)
                correlation_id = message.correlation_id
                del message  # before it waits: of what is refused nothing is held
                if isinstance(step, StepRequest) and step.form.server_epoch != self._table.server_epoch:
                    self._identity.judge(step, context)
                num_bytes = step.message_bytes if isinstance(step, StepRequest) else 0
                await stream.window.acquire(num_bytes)
                if wait_s := self._turns.wait_s(stream.principal.number):
                    await asyncio.sleep(wait_s)
                if isinstance(step, StepRequest) and step.hidden.nbytes >= LARGE_BYTES:
                    await self._examine(step)
                stream.num_taken += 1
                on_done: Callable[[StepResult | Refusal], None] = partial(stream.answer, correlation_id, num_bytes)
                if span is None:
                    self._submit_safely(step, on_done, reply_turns)
                else:
                    with span:
                        self._submit_safely(step, span.ending(step, on_done), reply_turns)
                del step  # nothing is held while the stream waits: it may lie in memory to be unmapped
        finally:
            stream.answers.put_nowait(None)

    def _until_s(self, context: Context) -> float | None:
        """When the RPC's own deadline is, None for none."""
        remaining_s = context.time_remaining()
        return None if remaining_s is None else self._clock() + remaining_s

    def _read_safely(self, message: StepMessage, stream: _Stream) -> StepRequest | Refusal:
        """Check a step of a stream; what is raised is refused."""
        client, principal = stream.client, stream.principal
        try:
            if self._guesses.is_slowing:
                self._guesses.check(client, principal)
            return requests.read_step(
                message, self._served, now_s=self._clock(), until_s=stream.until_s, principal=principal, client=client
            )
        except Exception as error:
            return _refusal(error)

    async def _examine(self, step: StepRequest) -> None:
        """Look at a large tensor before the scheduler has to, so that the event loop need not wait for that."""
        step.is_finite = await self._finite_check.all_finite(step.hidden)
        if not step.is_finite:
            step.finite = await self._finite_check.finite_rows(step.hidden, step.form.query_start_loc[:-1])
        if step.is_kept_as_checksum:
            step.checksum = self._finite_check.begin_checksum(step.hidden)

    def _submit_safely(
        self, step: StepRequest | Refusal, answer: Callable[[StepResult | Refusal], None], reply_turns: int
    ) -> None:
        """Hand a step to the scheduler; what that raises is refused."""
        if isinstance(step, Refusal):
            answer(step)
            return
        try:
            self._scheduler.submit(step, answer, reply_turns)
        except Exception as error:
            answer(_refusal(error))

    def _stream_response(self, correlation_id: int, answer: StepResult | Refusal, stream: _Stream) -> replies.Pieces:
        """The message that answers one step of a stream."""
        if isinstance(answer, StepResult):
            if answer.refusals:
                self._guesses.add(stream.client, stream.principal, num_unknown(answer.refusals))
            return replies.stream_response(correlation_id, answer)
        self._observer.refused(answer.reason, 1)
        return replies.stream_status(correlation_id, answer)


class _Stream:
    """One stream: whose it is, how many steps it has taken, and the answers that are to be written."""

    def __init__(
        self, context: Context, budget: SharedBudget, until_s: float | None, refusals: Refusals, generation: int
    ) -> None:
        """until_s: the RPC's own deadline, None for none. refusals: when one may be answered. generation: of the
        principals, when this one was admitted."""
        self.principal, self.client, self.generation = current_principal(), context.peer(), generation
        self.until_s, self.num_taken = until_s, 0
        self.window = StreamWindow(STREAM_STEPS, STREAM_BYTES, budget, self.principal)
        self.answers: asyncio.Queue[tuple[int, int, StepResult | Refusal] | None] = asyncio.Queue()
        self._refusals, self._loop = refusals, asyncio.get_running_loop()

    def belong_to(self, principal: Principal) -> None:
        """It is from another, or from one who may have another share. Not while its window waits."""
        self.principal = principal
        self.window.belong_to(principal)

    def answer(self, correlation_id: int, num_bytes: int, result: StepResult | Refusal) -> None:
        """A step of so many bytes is over; a refusal is kept back as its principal's have to be."""
        hold_s = self._refusals.hold_s(self.principal.name) if isinstance(result, Refusal) else 0.0
        if hold_s:
            self._loop.call_later(hold_s, self.answers.put_nowait, (correlation_id, num_bytes, result))
        else:
            self.answers.put_nowait((correlation_id, num_bytes, result))


def num_unknown(refusals: Mapping[int, Refusal]) -> int:
    """How many of the rows named sequences that are none of the principal's."""
    return sum(refusal.reason is Reason.SEQUENCE_UNKNOWN for refusal in refusals.values())


def _refusal(error: Exception) -> Refusal:
    """What a step is refused with that raised this, whose frames hold nothing of it any more."""
    empty_frames(error)
    return error.refusal if isinstance(error, RequestError) else bug(error)


def _empty_reader(reader: asyncio.Task[None]) -> None:
    """Let a reader that failed hold nothing while the stream's answers are written."""
    if not reader.cancelled():
        empty_frames(reader.exception())


def _reply_turns(context: Context) -> int:
    """Turns of the event loop that a reply of a call takes: gRPC's contexts don't say it."""
    turns: int = getattr(context, "reply_turns", GRPC_REPLY_TURNS)
    return turns


def _complete(done: asyncio.Future[StepResult], result: StepResult) -> None:
    """Hand the result to the waiting call, unless it was cancelled."""
    if not done.done():
        done.set_result(result)
