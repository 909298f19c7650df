"""StateService: snapshots of sequences, and sequences that go on from them.

A handler only waits for work: an RPC that is cancelled cancels nothing, and the same call sent again gets what it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from deltaline.v1 import state_service_pb2 as pb
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front import replies, reply_bytes, requests
from deltaline_server.front.identity import Identity
from deltaline_server.front.interceptor import Context
from deltaline_server.front.pace import PACE, Pace
from deltaline_server.front.requests import MAX_SNAPSHOTS, Served
from deltaline_server.front.states.imports import Imports, import_message
from deltaline_server.front.trust.guesses import Guesses
from deltaline_server.front.trust.principals import Principals, current_principal
from deltaline_server.moving.mover import Mover
from deltaline_server.snapshots.sequences.passage import Passage
from deltaline_server.snapshots.states import States
from deltaline_server.tables.captured.snapshot import SnapshotState
from deltaline_server.tables.prefixes.cost import ReusePolicy
from deltaline_server.tables.request_ids import RequestIds, digest
from deltaline_server.tables.sequence import GONE
from deltaline_server.tables.sequences import SequenceTable

# Snapshots that a call is about in one turn of the event loop; 4,096 took 50 ms to release and 38 ms to list, in which
# nobody's steps ran (2 busy cores, 2026-11-24).
AT_ONCE = 256

NAME = pb.DESCRIPTOR.services_by_name["StateService"].full_name


class StateService:
    """The handlers of StateService. They take parsed messages and return serialised replies."""

    def __init__(
        self,
        *,
        states: States,
        passage: Passage,
        table: SequenceTable,
        served: Served,
        identity: Identity,
        guesses: Guesses,
        principals: Principals,
        mover: Mover,
        settle: Callable[[], object],
        clock: Callable[[], float],
        pace: Pace = PACE,
    ) -> None:
        """`guesses` are those of LayerService; `principals` are whose states may come from elsewhere; `settle` brings
        the books of sequences up to date; `clock` counts monotonic seconds; `pace` is that of exports and imports."""
        self._states, self._passage, self._table, self._served = states, passage, table, served
        self._identity, self._mover, self._pace, self._guesses, self._settle = identity, mover, pace, guesses, settle
        self.request_ids = RequestIds(clock)
        self._imports = Imports(
            passage=passage,
            table=table,
            served=served,
            identity=identity,
            principals=principals,
            request_ids=self.request_ids,
            pace=pace,
        )

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a grpc.aio server registers."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            NAME,
            {
                "ForkSequences": unary(self.fork_sequences, pb.ForkSequencesRequest.FromString),
                "CreateSnapshots": unary(self.create_snapshots, pb.CreateSnapshotsRequest.FromString),
                "RestoreSequences": unary(self.restore_sequences, pb.RestoreSequencesRequest.FromString),
                "FindSnapshots": unary(self.find_snapshots, pb.FindSnapshotsRequest.FromString),
                "ListSnapshots": unary(self.list_snapshots, pb.ListSnapshotsRequest.FromString),
                "RenewSnapshots": unary(self.renew_snapshots, pb.RenewSnapshotsRequest.FromString),
                "ReleaseSnapshots": unary(self.release_snapshots, pb.ReleaseSnapshotsRequest.FromString),
                "ExportState": grpc.unary_stream_rpc_method_handler(
                    self.export_state, pb.ExportStateRequest.FromString
                ),
                "ImportState": grpc.stream_unary_rpc_method_handler(self._imports.import_state, import_message),
                "MoveSequences": unary(self.move_sequences, pb.MoveSequencesRequest.FromString),
            },
        )

    async def fork_sequences(self, message: pb.ForkSequencesRequest, context: Context) -> bytes:
        """Open children."""
        epoch = self._identity.epoch(message.server_epoch, context)
        handles = requests.read_handles(message.sequence, self._served)
        count = requests.read_children(message.count, len(handles), self._served)
        lease_s = requests.read_lease_s(message.lease_ms, self._served)
        principal = current_principal()

        async def work() -> bytes:
            self._settle()
            opened = await self._states.fork(epoch, handles, count, principal, lease_s=lease_s)
            first = self._table.describe(self._table.server_epoch, opened.handles[::count], principal)
            for child in first:
                if child.state in GONE:  # a lease so short that it was over before the reply
                    raise RequestError(*GONE[child.state])
            return replies.fork_response(self._table.server_epoch, self._identity.name, opened, first)

        return await self._once_by_handles("ForkSequences", message, work, context)

    async def create_snapshots(self, message: pb.CreateSnapshotsRequest, context: Context) -> bytes:
        """Capture states."""
        epoch = self._identity.epoch(message.server_epoch, context)
        handles = requests.read_handles(message.sequence, self._served, reply_bytes.SNAPSHOT_BYTES)
        lease_s = requests.read_lease_s(message.lease_ms, self._served)
        keys = requests.read_prefix_keys(message.prefix_key, len(handles))
        principal, is_pinned = current_principal(), message.pinned

        async def work() -> bytes:
            self._settle()
            made = await self._states.create(epoch, handles, principal, lease_s=lease_s, is_pinned=is_pinned, keys=keys)
            return pb.CreateSnapshotsResponse(snapshots=map(replies.snapshot, made)).SerializeToString()

        return await self._once_by_handles("CreateSnapshots", message, work, context)

    async def restore_sequences(self, message: pb.RestoreSequencesRequest, context: Context) -> bytes:
        """Go on from snapshots."""
        ids = requests.read_snapshot_ids(message.snapshot_id, self._served.limits.max_sequences)
        reply_bytes.check("snapshot_id", len(ids), reply_bytes.RESTORED_BYTES)
        lease_s = requests.read_lease_s(message.lease_ms, self._served)
        principal = current_principal()

        async def work() -> bytes:
            async with self._states.near(ids, principal):
                self._settle()
                opened = self._states.restore(ids, principal, lease_s=lease_s)
            told = self._table.describe(self._table.server_epoch, opened.handles, principal)
            return replies.restore_response(self._table.server_epoch, self._identity.name, opened, told)

        return await self._once("RestoreSequences", message, work)

    async def find_snapshots(self, message: pb.FindSnapshotsRequest, context: Context) -> bytes:
        """Tell from which snapshot a prompt can go on."""
        keys, principal = requests.read_prefix(message.prefix), current_principal()
        adapter_hash = self._table.adapters.content_hash(message.adapter, principal)
        match = self._states.find(keys, adapter_hash, principal, ReusePolicy.ALWAYS)
        return pb.FindSnapshotsResponse(match=replies.prefix_match(match)).SerializeToString()

    async def list_snapshots(self, message: pb.ListSnapshotsRequest, context: Context) -> bytes:
        """Tell which snapshots there are."""
        (after, limit), response = requests.read_page(message), pb.ListSnapshotsResponse()
        response.server_epoch, response.server = self._table.server_epoch, self._identity.name
        while True:
            count = min(limit - len(response.snapshots), AT_ONCE)
            page, response.has_more = self._states.snapshots.describe(current_principal(), after, count)
            response.snapshots.extend(map(replies.snapshot, page))
            if not response.has_more or len(response.snapshots) == limit:
                return response.SerializeToString()
            after = page[-1].id
            await asyncio.sleep(0)

    async def renew_snapshots(self, message: pb.RenewSnapshotsRequest, context: Context) -> bytes:
        """Move lease deadlines."""
        ids = requests.read_snapshot_ids(message.snapshot_id, MAX_SNAPSHOTS)
        lease_s = requests.read_lease_s(message.lease_ms, self._served)
        principal = current_principal()

        async def work() -> bytes:
            states = await _by_parts(ids, lambda some: self._states.snapshots.renew(some, principal, lease_s))
            return replies.renew_snapshots_response(states)

        return await self._once("RenewSnapshots", message, work)

    async def release_snapshots(self, message: pb.ReleaseSnapshotsRequest, context: Context) -> bytes:
        """End snapshots."""
        ids = requests.read_snapshot_ids(message.snapshot_id, MAX_SNAPSHOTS)
        principal = current_principal()

        async def work() -> bytes:
            states = await _by_parts(ids, lambda some: self._states.snapshots.release(some, principal))
            return replies.release_snapshots_response(states)

        return await self._once("ReleaseSnapshots", message, work)

    async def export_state(self, message: pb.ExportStateRequest, context: Context) -> AsyncIterator[bytes]:
        """Give a state away."""
        exchange, principal, pace = self._passage.existing_exchange(), current_principal(), self._pace
        async with AsyncExitStack() as held:
            held.enter_context(exchange.on_its_way(principal))
            if message.sequence or message.server_epoch:
                id = await held.enter_async_context(self._stored(message, context))
                pieces = exchange.pieces(id, principal, pause_s=pace.pause_s, whole_s=pace.whole_s)
            else:
                self._identity.check_name(context)
                [id] = requests.read_snapshot_ids([message.snapshot_id], 1)
                pieces = exchange.export(id, principal, pause_s=pace.pause_s, whole_s=pace.whole_s)
            await held.enter_async_context(aclosing(pieces))
            async for piece in pieces:
                yield pb.ExportStateResponse(chunk=bytes(piece)).SerializeToString()

    @asynccontextmanager
    async def _stored(self, message: pb.ExportStateRequest, context: Context) -> AsyncIterator[bytes]:
        """Inside the context the sequence that a request names lies in host memory, under this id."""
        if message.snapshot_id:
            text = "snapshot_id: must be empty where a sequence is named"
            raise RequestError(Reason.INVALID_REQUEST, text, field="snapshot_id")
        epoch = self._identity.epoch(message.server_epoch, context)
        handles, principal = requests.read_handles([message.sequence], self._served), current_principal()
        with self._slowed(context):
            async with self._passage.stored(epoch, handles, principal) as id:
                yield id

    async def move_sequences(self, message: pb.MoveSequencesRequest, context: Context) -> bytes:
        """Let sequences go on at another server."""
        epoch = self._identity.epoch(message.server_epoch, context)
        handles = requests.read_handles(message.sequence, self._served, reply_bytes.MOVED_BYTES)
        principal, client, target = current_principal(), context.peer(), message.target
        self._guesses.check(client, principal)

        async def work() -> bytes:
            moved = await self._mover.move(epoch, handles, principal, target)
            unknown = [one for one in moved.refusals.values() if one.reason is Reason.SEQUENCE_UNKNOWN]
            self._guesses.add(client, principal, len(unknown))
            _, states = self._table.lookup(epoch, handles, principal)
            # Those of earlier moves too.
            owners = moved.owners | self._table.owners(epoch, handles, states, principal)
            refusals = {row: refusal for row, refusal in moved.refusals.items() if row not in owners}
            return replies.move_response(owners, refusals)

        return await self._once("MoveSequences", message, work)

    async def close(self) -> None:
        """End what is under way; after the last call."""
        await self.request_ids.close()

    async def _once(self, method: str, message: Message, work: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """The reply of the work, or of the call that did it before with the message's request_id."""
        request_id = requests.read_request_id(getattr(message, "request_id"))  # noqa: B009 - Message has none
        content = digest(message.SerializeToString(deterministic=True))
        return await self.request_ids.once(current_principal(), method, request_id, content, work)

    async def _once_by_handles(
        self, method: str, message: Message, work: Callable[[], Coroutine[Any, Any, bytes]], context: Context
    ) -> bytes:
        """The same of a call that names sequences: who guesses them is slowed."""
        with self._slowed(context):
            return await self._once(method, message, work)

    @contextmanager
    def _slowed(self, context: Context) -> Iterator[None]:
        """Inside the context somebody's call names a sequence, which might be a guess."""
        self._guesses.check(context.peer(), current_principal())
        try:
            yield
        except RequestError as error:
            if error.refusal.reason is Reason.SEQUENCE_UNKNOWN:
                self._guesses.add(context.peer(), current_principal(), 1)
            raise


async def _by_parts(ids: list[bytes], call: Callable[[list[bytes]], list[SnapshotState]]) -> list[SnapshotState]:
    """What a call tells of snapshots, AT_ONCE in a turn of the event loop."""
    states = call(ids[:AT_ONCE])
    for first in range(AT_ONCE, len(ids), AT_ONCE):
        await asyncio.sleep(0)
        states += call(ids[first : first + AT_ONCE])
    return states
