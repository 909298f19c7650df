"""Ways to another server: gRPC, or the local link of one on this host. What goes and comes are messages' bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2

from deltaline import link
from deltaline.conversation import Array, Conversation, LinkCall
from deltaline.link_socket import LinkSocket, connect
from deltaline.wire import Buffer, write_pieces

# How long a server may take to take a message, and to answer behind the last one.
PAUSE_S = 30.0
# Of a file in a message, at most: of fewer the calls that send and take one cost more than its copies.
CHUNK_BYTES = 4 << 20
# The same where they go in packets alone: with what is around it, less than a packet.
PACKET_CHUNK_BYTES = link.MAX_PACKET_BYTES // 2
# Of link memory for messages, at least: while the server copies one others are on their way, or are written.
LINK_MEMORY_BYTES = 4 * (CHUNK_BYTES + link.MAX_PACKET_BYTES)
_DETAILS = "grpc-status-details-bin"

Metadata: TypeAlias = Sequence[tuple[str, str]]
Message: TypeAlias = tuple[Buffer, ...]
"""Pieces of a message, one behind the other."""
Messages: TypeAlias = AsyncIterator[Sequence[Message]]
"""Some at a time, whose pieces may change once the next are asked for."""
Begun: TypeAlias = tuple[LinkSocket[status_pb2.Status], LinkCall[status_pb2.Status], "asyncio.Future[bytes]"]


class CallError(Exception):
    """A call failed. status: what the server has said, or what is known of why it says nothing."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class Way(Protocol):
    """How calls go. Methods are named by their paths; metadata go with each."""

    chunk_bytes: int
    """Of a file in a message, at most; an upload may change it before it asks for the first one."""

    async def call(self, path: str, request: bytes, timeout_s: float) -> bytes:
        """The answer to a message. Raises CallError."""

    async def upload(self, path: str, messages: Messages, timeout_s: float) -> bytes:
        """The answer to a stream of messages. Raises CallError, and TimeoutError where one is not taken within PAUSE_S;
        what the messages raise."""


class GrpcWay:
    """By a channel."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel, self._metadata = channel, metadata

    async def call(self, path: str, request: bytes, timeout_s: float) -> bytes:
        """As Way.call."""
        try:
            call: Any = self._channel.unary_unary(path)
            answer: bytes = await call(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise CallError(_status_of(error)) from error
        return answer

    async def upload(self, path: str, messages: Messages, timeout_s: float) -> bytes:
        """As Way.upload."""
        begin: Any = self._channel.stream_unary(path)
        call = begin(metadata=self._metadata, timeout=timeout_s)
        writing: asyncio.Future[None] | None = None
        try:
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # it has answered already
                async for some in messages:
                    for message in some:
                        # While one is written the next is asked for and put together.
                        body = b"".join(message)
                        await _within_pause(writing)
                        writing = asyncio.ensure_future(call.write(body))
                await _within_pause(writing)
                await call.done_writing()
            async with asyncio.timeout(PAUSE_S):
                answer: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise CallError(_status_of(error)) from error
        finally:
            call.cancel()
            if writing is not None:
                writing.cancel()  # one that waits for its call to begin would wait for ever
                await asyncio.wait([writing])
                if not writing.cancelled():
                    writing.exception()  # the call says it
        return answer


class LinkWay:
    """By the link, on one connection after the other where they break. Large messages lie in memory of the server's; on
    the connection that follows one which ended as the server gave none, there are none."""

    def __init__(self, path: str) -> None:
        """path: where the server listens. Attribute metadata: of the calls from then on."""
        self._path = path
        self.metadata: Metadata = ()
        self.chunk_bytes = CHUNK_BYTES
        self._connection: LinkSocket[status_pb2.Status] | None = None
        self._connecting = asyncio.Lock()

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._connection is not None:
            self._connection.close(status_pb2.Status(code=code_pb2.CANCELLED))

    async def call(self, path: str, request: bytes, timeout_s: float) -> bytes:
        """As Way.call."""
        async with self._begun(path, timeout_s) as (connection, call, ended):
            connection.conversation.send(call, request, is_last=True)
            connection.flush()
            return await ended

    async def upload(self, path: str, messages: Messages, timeout_s: float) -> bytes:
        """As Way.upload."""
        async with self._begun(path, timeout_s) as begun:
            connection, call, ended = begun
            async for some in messages:
                await _send(some, *begun)
                if ended.done():
                    break
            connection.conversation.send(call, None, is_last=True)
            connection.flush()
            async with asyncio.timeout(PAUSE_S):
                return await ended

    @asynccontextmanager
    async def _begun(self, path: str, timeout_s: float) -> AsyncIterator[Begun]:
        """Inside the context a call: its connection, itself, and its answer, which may be a CallError."""
        ended, bodies = asyncio.get_running_loop().create_future(), list[bytes]()
        try:
            connection = await self.connect()
        except (OSError, ValueError) as error:
            raise CallError(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="no server answers")) from error

        def end(error: status_pb2.Status | None) -> None:
            if not ended.done() and error is None:
                ended.set_result(b"".join(bodies))
            elif not ended.done() and error is not None:
                ended.set_exception(CallError(error))

        conversation = connection.conversation
        call = conversation.begin(path, bodies.append, end, timeout_s=timeout_s, metadata=tuple(self.metadata))
        try:
            async with asyncio.timeout(timeout_s):
                yield connection, call, ended
        finally:
            conversation.cancel(call)
            connection.flush()
            if ended.done() and not ended.cancelled():
                ended.exception()  # who asked may have gone

    async def connect(self) -> LinkSocket[status_pb2.Status]:
        """A connection that is not over. Raises OSError, ValueError unless a server of the user that owns the socket's
        folder answers."""
        async with self._connecting:  # or each of several calls would make one
            if self._connection is None or self._connection.is_over:
                lacked_memory = self._connection is not None and self._connection.conversation.lacks_memory
                self.chunk_bytes = PACKET_CHUNK_BYTES if lacked_memory else CHUNK_BYTES
                connected, welcome = await asyncio.to_thread(connect, self._path)
                conversation = Conversation(welcome.message_bytes, lambda status: status, LINK_MEMORY_BYTES)
                self._connection = LinkSocket(connected, conversation)
            return self._connection


async def _within_pause(writing: asyncio.Future[None] | None) -> None:
    """Wait until a message is taken, if there is one. Raises TimeoutError; what writing it raises."""
    if writing is not None:
        async with asyncio.timeout(PAUSE_S):
            await writing


async def _send(
    messages: Sequence[Message],
    connection: LinkSocket[status_pb2.Status],
    call: LinkCall[status_pb2.Status],
    ended: asyncio.Future[bytes],
) -> None:
    """Send messages, in their order, until the call has ended. Threads write those that are large into link memory, as
    many at once as lie there; one that is too large for the server ends the call. Raises TimeoutError where one is not
    taken within PAUSE_S."""
    conversation, loop = connection.conversation, asyncio.get_running_loop()
    writing = deque[tuple[Array, asyncio.Future[None]]]()

    async def send_first() -> None:
        """Send the first of those that are written."""
        room, written = writing.popleft()
        await written
        conversation.send(call, room)
        connection.flush()

    try:
        for message in messages:
            num_bytes = sum(map(len, message))
            async with asyncio.timeout(PAUSE_S):
                if link.MAX_PACKET_BYTES <= num_bytes <= conversation.message_bytes:
                    while (room := conversation.room(num_bytes)) is None:
                        if ended.done():
                            return
                        connection.flush()
                        await (send_first() if writing else connection.until_moved())
                    writing.append((room, loop.run_in_executor(None, write_pieces, message, room)))
                    continue
                while writing:
                    await send_first()
                conversation.send(call, message)
                connection.flush()
                while call.outbox and not ended.done():
                    await connection.until_moved()
        async with asyncio.timeout(PAUSE_S):
            while writing:
                await send_first()
    finally:
        for _, written in writing:
            written.cancel()


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """What a server has said."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            with suppress(DecodeError):
                return status_pb2.Status.FromString(value)
    return status_pb2.Status(code=error.code().value[0])  # its details, which are gRPC's own, may hold addresses
