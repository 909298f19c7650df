"""LayerService: sequences and their steps. A handler only waits for work: an RPC that is cancelled cancels nothing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import grpc

from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.finite import LARGE_BYTES, FiniteCheck
from deltaline_server.front import replies, reply_bytes, requests
from deltaline_server.front.flow_control import SharedBudget, StreamWindow
from deltaline_server.front.identity import Identity
from deltaline_server.front.interceptor import Context, bug, empty_frames
from deltaline_server.front.requests import Served
from deltaline_server.front.steps.step_message import StepMessage, StreamStep
from deltaline_server.front.steps.step_parser import StepParser
from deltaline_server.front.trust.guesses import Guesses
from deltaline_server.front.trust.principals import Principals, current_principal
from deltaline_server.front.trust.refusals import Refusals
from deltaline_server.front.trust.turns import Turns
from deltaline_server.principal import Principal
from deltaline_server.scheduling.observer import Observer
from deltaline_server.scheduling.scheduler import GRPC_REPLY_TURNS, Scheduler
from deltaline_server.snapshots.sequences.passage import Passage
from deltaline_server.snapshots.states import States
from deltaline_server.step import StepRequest, StepResult
from deltaline_server.tables.open_tokens import Opened, Origin
from deltaline_server.tables.prefixes.cost import ReusePolicy
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequences import SequenceTable

if TYPE_CHECKING:
    from deltaline_server.telemetry.tracing import Tracing  # OpenTelemetry may not be installed

NAME = pb.DESCRIPTOR.services_by_name["LayerService"].full_name
STEP_STREAM = f"/{NAME}/StepStream"
# Steps of a stream that are taken and whose replies are not written, and bytes of their tensors: they bound what a fast
# writer or a slow reader makes the server hold. Eight steps of the largest inline tensor by default.
STREAM_STEPS = 64
STREAM_BYTES = 32 * 2**20
# Of all streams together: of many that nobody reads, each costs one step beyond this.
ALL_STREAMS_BYTES = 8 * STREAM_BYTES


class LayerService:
    """The handlers of LayerService. They take parsed messages and return serialised replies."""

    def __init__(
        self,
        *,
        table: SequenceTable,
        scheduler: Scheduler,
        served: Served,
        identity: Identity,
        observer: Observer,
        principals: Principals,
        refusals: Refusals,
        turns: Turns,
        clock: Callable[[], float],
        tracing: Tracing | None = None,
        states: States,
        passage: Passage,
    ) -> None:
        """`observer` counts what streams refuse, and `refusals` says when that may be answered; `turns` says when
        their steps begin; `principals` judges those that live on; `states` are what sequences may begin with;
        `clock` is the scheduler's: monotonic seconds."""
        self._tracing, self._principals, self._refusals = tracing, principals, refusals
        self._states, self._passage = states, passage
        self._table, self._scheduler, self._served, self._identity = table, scheduler, served, identity
        self._observer, self._clock, self._turns = observer, clock, turns
        self._stream_readers: set[asyncio.Task[None]] = set()
        self._budget = SharedBudget(ALL_STREAMS_BYTES)
        self.guesses = Guesses(table.num_slots, clock)
        self._finite_check = FiniteCheck()
        self._describe_bytes = reply_bytes.describe_bytes(len(served.shapes))

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a grpc.aio server registers."""
        unary, parser = grpc.unary_unary_rpc_method_handler, StepParser(self._served.limits.max_sequences)
        return grpc.method_handlers_generic_handler(
            NAME,
            {
                "OpenSequences": unary(self.open_sequences, pb.OpenSequencesRequest.FromString),
                "CloseSequences": unary(self.close_sequences, pb.CloseSequencesRequest.FromString),
                "DescribeSequences": unary(self.describe_sequences, pb.DescribeSequencesRequest.FromString),
                "RenewLeases": unary(self.renew_leases, pb.RenewLeasesRequest.FromString),
                "Step": unary(self.step, parser.parse_step, replies.JOIN),
                "CommitSequences": unary(self.commit_sequences, pb.CommitSequencesRequest.FromString),
                "StepStream": grpc.stream_stream_rpc_method_handler(
                    self.step_stream, parser.parse_stream_step, replies.JOIN
                ),
            },
        )

    async def open_sequences(self, message: pb.OpenSequencesRequest, context: Context) -> bytes:
        """Open sequences."""
        self._scheduler.settle()  # it may end sequences, whose lines are free then
        count, principal = requests.read_count(message, self._served), current_principal()
        lease_s, policy = requests.read_lease_s(message.lease_ms, self._served), requests.read_reuse(message.reuse)
        if message.HasField("prefix"):
            origin, inside = self._from_prompt(message, policy, count, lease_s, principal)
        elif message.snapshot_id:
            origin = Origin(snapshot=message.snapshot_id)
            inside = partial(self._from_snapshot, [message.snapshot_id] * count, principal, lease_s)
        else:
            opened = self._table.open(count, lease_s, message.open_token, message.adapter, principal)
            return replies.open_response(self._table.server_epoch, self._identity.name, opened)
        opened = await self._table.tokens.once_inside(principal, message.open_token, count, origin, inside)
        if opened.match is not None and opened.match.prefix is None:
            return replies.open_response(self._table.server_epoch, self._identity.name, opened)
        [first] = self._table.describe(self._table.server_epoch, opened.handles[:1], principal)
        return replies.open_response(self._table.server_epoch, self._identity.name, opened, first)

    def _from_prompt(
        self,
        message: pb.OpenSequencesRequest,
        policy: ReusePolicy,
        count: int,
        lease_s: float | None,
        principal: Principal,
    ) -> tuple[Origin, Callable[[], AbstractAsyncContextManager[Callable[[], Opened]]]]:
        """What tells an open with a prompt's keys from others, and what keeps near what is found of it and gives what
        opens its sequences."""
        keys, table, adapter = requests.read_prefix(message.prefix), self._table, message.adapter

        @asynccontextmanager
        async def inside() -> AsyncIterator[Callable[[], Opened]]:
            adapter_hash = table.adapters.content_hash(adapter, principal)
            otherwise = partial(table.open, count, lease_s, adapter=adapter, principal=principal)
            async with self._states.near_found(keys, adapter_hash, principal, policy) as found:
                yield partial(
                    self._states.open,
                    found,
                    keys,
                    adapter_hash,
                    principal,
                    count=count,
                    lease_s=lease_s,
                    otherwise=otherwise,
                )

        prompt = hashlib.blake2b(keys.words.tobytes(), digest_size=16)
        prompt.update(b"%d %d" % (keys.prompt_tokens, policy))
        return Origin(adapter, prompt=prompt.digest()), inside

    @asynccontextmanager
    async def _from_snapshot(
        self, ids: Sequence[bytes], principal: Principal, lease_s: float | None
    ) -> AsyncIterator[Callable[[], Opened]]:
        """Keep snapshots near, and give what opens a sequence of each."""
        async with self._states.near(ids, principal):
            yield partial(self._states.restore, ids, principal, lease_s=lease_s)

    async def close_sequences(self, message: pb.CloseSequencesRequest, context: Context) -> bytes:
        """End sequences."""
        self._scheduler.settle()
        epoch = self._identity.epoch(message.server_epoch, context)
        handles = requests.read_handles(message.sequence, self._served, reply_bytes.STATE_BYTES)
        self.guesses.check(context.peer(), current_principal())
        states = self._table.close(epoch, handles, current_principal())
        self.guesses.add(context.peer(), current_principal(), states.count(SequenceState.UNKNOWN))
        return replies.close_response(states, self._table.owners(epoch, handles, states, current_principal()))

    async def describe_sequences(self, message: pb.DescribeSequencesRequest, context: Context) -> bytes:
        """Tell what is held."""
        self._scheduler.settle()
        epoch = self._identity.epoch(message.server_epoch, context)
        handles = requests.read_handles(message.sequence, self._served, self._describe_bytes)
        self.guesses.check(context.peer(), current_principal())
        told = self._table.describe(epoch, handles, current_principal())
        self.guesses.add(context.peer(), current_principal(), sum(one.state is SequenceState.UNKNOWN for one in told))
        owners = self._table.owners(epoch, handles, [one.state for one in told], current_principal())
        return replies.describe_response(handles, told, owners)

    async def renew_leases(self, message: pb.RenewLeasesRequest, context: Context) -> bytes:
        """Move lease deadlines."""
        epoch = self._identity.epoch(message.server_epoch, context)
        handles = requests.read_handles(message.sequence, self._served, reply_bytes.STATE_BYTES)
        lease_s = requests.read_lease_s(message.lease_ms, self._served)
        self.guesses.check(context.peer(), current_principal())
        leaving = self._passage.is_leaving(handles, current_principal())
        if leaving.any():  # the others may not wait with them: their leases run on
            self._table.renew(epoch, handles[~leaving], lease_s, current_principal())
            await self._passage.until_none_leaves(handles[leaving], current_principal())
        states = self._table.renew(epoch, handles, lease_s, current_principal())
        self.guesses.add(context.peer(), current_principal(), states.count(SequenceState.UNKNOWN))
        return replies.renew_response(states, self._table.owners(epoch, handles, states, current_principal()))

    async def step(self, message: StepMessage, context: Context) -> replies.Pieces:
        """Apply one step. The work goes on, and its reply is kept, whatever becomes of this RPC."""
        remaining_s = context.time_remaining()
        until_s = None if remaining_s is None else self._clock() + remaining_s
        done: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        step = requests.read_step(
            message,
            self._served,
            now_s=self._clock(),
            until_s=until_s,
            principal=current_principal(),
            client=context.peer(),
        )
        if step.form.server_epoch != self._table.server_epoch:
            self._identity.judge(step, context)
        if self.guesses.is_slowing:
            self.guesses.check(step.client, step.principal)
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
            self.guesses.add(client, principal, _num_unknown(result.refusals))
        return replies.step_response(result)

    async def commit_sequences(self, message: pb.CommitSequencesRequest, context: Context) -> bytes:
        """Fix accepted counts."""
        commit = requests.read_commit(message, self._served)
        await self._passage.until_none_leaves(commit.handle, current_principal())
        self._scheduler.settle()
        epoch = self._identity.epoch(commit.server_epoch, context)
        self.guesses.check(context.peer(), current_principal())
        positions, refusals = self._table.commit(
            epoch, commit.span, commit.handle, commit.step, commit.accepted, current_principal()
        )
        self.guesses.add(context.peer(), current_principal(), _num_unknown(refusals))
        return replies.commit_response(positions, refusals)

    async def step_stream(self, messages: AsyncIterator[StreamStep], context: Context) -> AsyncIterator[replies.Pieces]:
        """Apply steps as they come and answer each when it is done.

        At most STREAM_STEPS with STREAM_BYTES are taken and not answered, or one where all streams hold
        ALL_STREAMS_BYTES, or those of its principal their share; beyond that the stream is not read, and gRPC's flow
        control holds the client. A message that can't be parsed, or is too large, ends the stream once the steps before
        it are answered; so does `end_streams`.
        """
        answers: asyncio.Queue[tuple[int, int, StepResult | Refusal] | None] = asyncio.Queue()
        principal, client, remaining_s = current_principal(), context.peer(), context.time_remaining()
        window = StreamWindow(STREAM_STEPS, STREAM_BYTES, self._budget, principal)
        until_s = None if remaining_s is None else self._clock() + remaining_s
        num_taken, begin_span, generation, reply_turns = 0, None, self._principals.generation, _reply_turns(context)
        loop = asyncio.get_running_loop()
        if self._tracing is not None:
            begin_span = self._tracing.begin_stream(STEP_STREAM, context.invocation_metadata())

        def answer(correlation_id: int, num_bytes: int, result: StepResult | Refusal) -> None:
            hold_s = self._refusals.hold_s(principal.name) if isinstance(result, Refusal) else 0.0
            if hold_s:
                loop.call_later(hold_s, answers.put_nowait, (correlation_id, num_bytes, result))
            else:
                answers.put_nowait((correlation_id, num_bytes, result))

        async def take() -> None:
            nonlocal num_taken, principal, generation
            try:
                async for message in messages:
                    if generation != self._principals.generation:  # what was taken before is answered
                        generation = self._principals.generation
                        principal = self._principals.admit(STEP_STREAM, context) or principal
                        window.belong_to(principal)
                    span = None if begin_span is None else begin_span(message.traceparent)
                    step = self._read_safely(message.step, until_s, principal, client)
                    correlation_id = message.correlation_id
                    del message  # before it waits: of what is refused nothing is held
                    if isinstance(step, StepRequest) and step.form.server_epoch != self._table.server_epoch:
                        self._identity.judge(step, context)
                    num_bytes = step.message_bytes if isinstance(step, StepRequest) else 0
                    await window.acquire(num_bytes)
                    if wait_s := self._turns.wait_s(principal.number):
                        await asyncio.sleep(wait_s)
                    if isinstance(step, StepRequest) and step.hidden.nbytes >= LARGE_BYTES:
                        await self._examine(step)
                    num_taken += 1
                    on_done: Callable[[StepResult | Refusal], None] = partial(answer, correlation_id, num_bytes)
                    if span is None:
                        self._submit_safely(step, on_done, reply_turns)
                    else:
                        with span:
                            self._submit_safely(step, span.ending(step, on_done), reply_turns)
                    del step  # nothing is held while the stream waits: it may lie in memory to be unmapped
            finally:
                answers.put_nowait(None)

        reader = asyncio.create_task(take())
        reader.add_done_callback(_empty_reader)
        self._stream_readers.add(reader)
        num_answered, is_over = 0, False
        try:
            while not (is_over and num_answered == num_taken):
                answered = await answers.get()
                if answered is None:
                    is_over = True
                else:
                    correlation_id, num_bytes, result = answered
                    # Goes on when gRPC has taken the reply.
                    yield self._stream_response(correlation_id, result, client, principal)
                    num_answered += 1
                    window.release(num_bytes)
                    del answered, result  # as in take()
            await asyncio.wait((reader,))
            if not reader.cancelled():
                reader.result()
        finally:
            self._stream_readers.discard(reader)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            window.close()

    def close(self) -> None:
        """End its threads; after the last call."""
        self._finite_check.close()

    def end_streams(self) -> None:
        """Take no more steps from streams; each ends once those that it has taken are answered."""
        for reader in self._stream_readers:
            reader.cancel()

    def _read_safely(
        self, message: StepMessage, until_s: float | None, principal: Principal, client: str
    ) -> StepRequest | Refusal:
        """Check a step; until_s: the RPC's own deadline, None for none. What is raised is refused."""
        now_s, served = self._clock(), self._served
        try:
            if self.guesses.is_slowing:
                self.guesses.check(client, principal)
            return requests.read_step(message, served, now_s=now_s, until_s=until_s, principal=principal, client=client)
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

    def _stream_response(
        self, correlation_id: int, answer: StepResult | Refusal, client: str, principal: Principal
    ) -> replies.Pieces:
        """The message that answers one step of a client's stream."""
        if isinstance(answer, StepResult):
            if answer.refusals:
                self.guesses.add(client, principal, _num_unknown(answer.refusals))
            return replies.stream_response(correlation_id, answer)
        self._observer.refused(answer.reason, 1)
        return replies.stream_status(correlation_id, answer)


def _refusal(error: Exception) -> Refusal:
    """What a step is refused with that raised this, whose frames hold nothing of it any more."""
    empty_frames(error)
    return error.refusal if isinstance(error, RequestError) else bug(error)


def _empty_reader(reader: asyncio.Task[None]) -> None:
    """Let a reader that failed hold nothing while the stream's answers are written."""
    if not reader.cancelled():
        empty_frames(reader.exception())


def _num_unknown(refusals: Mapping[int, Refusal]) -> int:
    """How many of the rows named sequences that are none of the principal's."""
    return sum(refusal.reason is Reason.SEQUENCE_UNKNOWN for refusal in refusals.values())


def _reply_turns(context: Context) -> int:
    """Turns of the event loop that a reply of a call takes: gRPC's contexts don't say it."""
    turns: int = getattr(context, "reply_turns", GRPC_REPLY_TURNS)
    return turns


def _complete(done: asyncio.Future[StepResult], result: StepResult) -> None:
    """Hand the result to the waiting call, unless it was cancelled."""
    if not done.done():
        done.set_result(result)
