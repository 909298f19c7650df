"""States that come by ImportState: what its stream has, whose they are to be, and what becomes of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import NamedTuple

import numpy as np

from deltaline import wire
from deltaline.v1 import state_service_pb2 as pb
from deltaline.wire import Buffer
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front import replies, requests
from deltaline_server.front.identity import Identity
from deltaline_server.front.interceptor import Context
from deltaline_server.front.pace import Pace
from deltaline_server.front.requests import Served
from deltaline_server.front.trust.principals import Principals, check_role, current_principal
from deltaline_server.front.trust.roles import Role
from deltaline_server.memory.lent import Lent
from deltaline_server.principal import Principal
from deltaline_server.snapshots.exchange import Exchange
from deltaline_server.snapshots.header import StateHeader, StoredHeader
from deltaline_server.snapshots.sequences.passage import Passage
from deltaline_server.snapshots.stream import Arriving, Piece
from deltaline_server.tables.request_ids import RequestIds, digest
from deltaline_server.tables.sequence import GONE
from deltaline_server.tables.sequences import SequenceTable

# A message of the stream; of one that has nothing else, its chunk, which is not copied.
ImportMessage = pb.ImportStateRequest | memoryview | Lent


class _Import(NamedTuple):
    """What a call asks, and what comes by it: the state behind a header, whose it is to be, and its lease."""

    asked: pb.ImportStateRequest
    arriving: Arriving
    stored: StoredHeader
    owner: Principal
    lease_s: float | None


class Imports:
    """Takes states in, each once: a call that comes again gets the reply that it had."""

    def __init__(
        self,
        *,
        passage: Passage,
        table: SequenceTable,
        served: Served,
        identity: Identity,
        principals: Principals,
        request_ids: RequestIds,
        pace: Pace,
    ) -> None:
        """`principals` are whose states may come from elsewhere."""
        self._passage, self._table, self._served, self._identity = passage, table, served, identity
        self._principals, self._request_ids, self._pace = principals, request_ids, pace

    async def import_state(self, messages: AsyncIterator[ImportMessage], context: Context) -> bytes:
        """Take a state in."""
        exchange, principal = self._passage.existing_exchange(), current_principal()
        with exchange.on_its_way(principal):
            async with self._pace.upload(messages) as coming:
                asked, pieces = await _read(coming)
                requests.read_request_id(asked.request_id)
                lease_s = requests.read_lease_s(asked.lease_ms, self._served)
                arriving = Arriving(pieces)
                stored, asked.chunk = await exchange.read_header(arriving)
                owner = self._owner(asked, stored.header)
                exchange.check_adapter(stored.header, owner)
                if stored.header.is_sequence != asked.sequence:
                    message = "sequence: the file is a sequence's, which is loaded with it, in Python by load_sequence"
                    if asked.sequence:
                        message = "sequence: the file is a snapshot's, loaded without it, in Python by snapshots.load"
                    raise RequestError(Reason.INVALID_REQUEST, message, field="sequence")
                take = self._sequence if asked.sequence else self._snapshot
                return await take(exchange, _Import(asked, arriving, stored, owner, lease_s))

    def _owner(self, asked: pb.ImportStateRequest, header: StateHeader) -> Principal:
        """Whose it is to be what comes: the caller's, or by its name theirs whose it was. Raises RequestError
        ROLE_MISSING, STATE_MISMATCH."""
        caller = current_principal()
        if not asked.keep_owner or header.owner == caller.name:
            check_role(Role.STEP)
            return caller
        check_role(Role.PEER)
        owner = self._principals.named(header.owner)
        if owner is None:
            message = "keep_owner: expected a principal that is known here by the name of the one whose it was"
            raise RequestError(Reason.STATE_MISMATCH, message)
        return owner

    async def _snapshot(self, exchange: Exchange, one: _Import) -> bytes:
        """Keep what arrives as a snapshot."""
        asked, arriving, stored, owner, lease_s = one
        call = _call(asked)
        reply = self._request_ids.find(*call)
        if reply is not None:
            return reply
        async with exchange.received(arriving, stored, owner, is_pinned=asked.pinned) as header:
            # The same call may have come again, and been faster.
            reply = self._request_ids.find(*call)
            if reply is None:
                snapshot = replies.snapshot(exchange.add(header, owner, lease_s))
                reply = pb.ImportStateResponse(
                    snapshot=snapshot, server_epoch=self._table.server_epoch, server=self._identity.name
                ).SerializeToString()
                self._request_ids.add(*call, reply)
        return reply

    async def _sequence(self, exchange: Exchange, one: _Import) -> bytes:
        """Open a sequence that goes on where what arrives stood, pages of which may come ahead; the same call may have
        come before, or come again and be faster."""
        asked, arriving, stored, owner, lease_s = one
        if asked.pinned:
            message = "pinned: must not be set for a sequence"
            raise RequestError(Reason.INVALID_REQUEST, message, field="pinned")
        lease_s = self._table.checked_lease(lease_s)
        with self._passage.coming(owner) as coming:
            while stored.header.is_pages:
                coming.expect(stored.header)
                await coming.land(partial(exchange.arrived, arriving, stored, owner, is_pinned=False))
                stored, asked.chunk = await exchange.read_header(arriving)
            call = _call(asked)
            reply = self._request_ids.find(*call)
            if reply is not None:
                self._check_there(reply, owner)
                return reply
            await coming.landed()  # else both would count in a share
            coming.expect(stored.header)
            async with exchange.received(arriving, stored, owner, is_pinned=False) as header:

                async def work() -> bytes:
                    handles = await coming.open(header, lease_s)
                    epoch = self._table.server_epoch
                    [told] = self._table.describe(epoch, handles, owner)
                    return replies.imported_sequence(epoch, self._identity.name, lease_s, int(handles[0]), told)

                return await self._request_ids.once(*call, work)

    def _check_there(self, reply: bytes, owner: Principal) -> None:
        """Renew the lease of the sequence that a kept reply tells of. Raises RequestError where that is over: who let
        go of the sequence elsewhere at such an answer would have none."""
        epoch = self._table.server_epoch
        handles = np.array([pb.ImportStateResponse.FromString(reply).sequence.sequence], dtype=np.uint64)
        [state] = states = self._table.renew(epoch, handles, principal=owner)
        if state in GONE and not self._table.owners(epoch, handles, states, owner):
            raise RequestError(*GONE[state])


def _call(asked: pb.ImportStateRequest) -> tuple[Principal, str, bytes, bytes]:
    """What makes a call the same: what its first message asks, and the header of what comes, in place of its chunk."""
    content = digest(asked.SerializeToString(deterministic=True))
    return current_principal(), "ImportState", asked.request_id, content


def import_message(body: Buffer | Lent) -> ImportMessage:
    """Read a message of the stream."""
    if isinstance(body, Lent):
        message = import_message(body.content)
        if isinstance(message, memoryview):
            return body._replace(content=message)
        body.give_back()
        return message
    head = wire.field_head(pb.ImportStateRequest.CHUNK_FIELD_NUMBER, len(body))
    for size in (len(head), len(head) - 1):  # of a length that takes as many bytes as that of all, or one less
        chunk = memoryview(body)[size:]
        if chunk and body[:size] == wire.field_head(pb.ImportStateRequest.CHUNK_FIELD_NUMBER, len(chunk)):
            return chunk
    return pb.ImportStateRequest.FromString(bytes(body))  # what others may write is not parsed


async def _read(messages: AsyncIterator[ImportMessage]) -> tuple[pb.ImportStateRequest, AsyncIterator[Piece]]:
    """Take the first message of a stream; return it, and the chunks of all. Raises RequestError INVALID_REQUEST; so do
    the chunks."""
    first = await anext(messages, None)
    if first is None:
        message = "request_id: must be set: the stream had no message"
        raise RequestError(Reason.INVALID_REQUEST, message, field="request_id")
    if isinstance(first, Lent):
        content, give_back = first
        first = pb.ImportStateRequest(chunk=bytes(content))
        give_back()
    elif isinstance(first, memoryview):
        first = pb.ImportStateRequest(chunk=bytes(first))
    return first, _chunks(first.chunk, messages)


async def _chunks(chunk: bytes, messages: AsyncIterator[ImportMessage]) -> AsyncIterator[Piece]:
    if chunk:
        yield chunk
    async for message in messages:
        if isinstance(message, memoryview | Lent):
            yield message
            continue
        chunk, message.chunk = message.chunk, b""
        if not chunk or message.ByteSize():
            text = "chunk: must be all that a later message has"
            raise RequestError(Reason.INVALID_REQUEST, text, field="chunk")
        yield chunk
