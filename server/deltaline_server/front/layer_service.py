"""LayerService: sequences and their steps. A handler only waits for work: an RPC that is cancelled cancels nothing."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import grpc

from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.front import replies, reply_bytes, requests
from deltaline_server.front.identity import Identity
from deltaline_server.front.interceptor import Context
from deltaline_server.front.requests import Served
from deltaline_server.front.steps.step_parser import StepParser
from deltaline_server.front.steps.stepping import Stepping, num_unknown
from deltaline_server.front.trust.guesses import Guesses
from deltaline_server.front.trust.principals import Principals, current_principal
from deltaline_server.front.trust.refusals import Refusals
from deltaline_server.front.trust.turns import Turns
from deltaline_server.principal import Principal
from deltaline_server.scheduling.observer import Observer
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.snapshots.sequences.passage import Passage
from deltaline_server.snapshots.states import States
from deltaline_server.tables.open_tokens import Opened, Origin
from deltaline_server.tables.prefixes.cost import ReusePolicy
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequences import SequenceTable

if TYPE_CHECKING:
    from deltaline_server.telemetry.tracing import Tracing  # OpenTelemetry may not be installed

NAME = pb.DESCRIPTOR.services_by_name["LayerService"].full_name


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
        self._table, self._scheduler, self._served, self._identity = table, scheduler, served, identity
        self._states, self._passage = states, passage
        self.guesses = Guesses(table.num_slots, clock)
        self.stepping = Stepping(
            table=table,
            scheduler=scheduler,
            served=served,
            identity=identity,
            guesses=self.guesses,
            observer=observer,
            principals=principals,
            refusals=refusals,
            turns=turns,
            clock=clock,
            tracing=tracing,
        )
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
                "Step": unary(self.stepping.step, parser.parse_step, replies.JOIN),
                "CommitSequences": unary(self.commit_sequences, pb.CommitSequencesRequest.FromString),
                "StepStream": grpc.stream_stream_rpc_method_handler(
                    self.stepping.step_stream, parser.parse_stream_step, replies.JOIN
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
        self.guesses.add(context.peer(), current_principal(), num_unknown(refusals))
        return replies.commit_response(positions, refusals)
