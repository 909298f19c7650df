"""Ways to another server: gRPC, or the local link of one on this host. What goes and comes are messages' bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2

from deltaline import link
from deltaline.conversation import Content, Conversation, LinkCall
from deltaline.link_socket import LinkSocket, connect
from deltaline.wire import Buffer, write_pieces

# How long a server may take to take a message, and to answer behind the last one.
PAUSE_S = 30.0
_DETAILS = "grpc-status-details-bin"

Metadata: TypeAlias = Sequence[tuple[str, str]]
Message: TypeAlias = tuple[Buffer, ...]
"""Pieces of a message, one behind the other."""
Begun: TypeAlias = tuple[LinkSocket[status_pb2.Status], LinkCall[status_pb2.Status], "asyncio.Future[bytes]"]


class CallError(Exception):
    """A call failed. status: what the server has said, or what is known of why it says nothing."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class Way(Protocol):
    """How calls go. Methods are named by their paths; metadata go with each."""

    async def call(self, path: str, request: bytes, timeout_s: float) -> bytes:
        """The answer to a message. Raises CallError."""

    async def upload(self, path: str, messages: AsyncIterator[Message], timeout_s: float) -> bytes:
        """The answer to a stream of messages, whose pieces may change once the next is asked for. Raises CallError, and
        TimeoutError where one is not taken within PAUSE_S; what the messages raise."""


class GrpcWay:
    """By a channel."""

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

    async def upload(self, path: str, messages: AsyncIterator[Message], timeout_s: float) -> bytes:
        """As Way.upload."""
        begin: Any = self._channel.stream_unary(path)
        call = begin(metadata=self._metadata, timeout=timeout_s)
        writing: asyncio.Future[None] | None = None
        try:
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # it has answered already
                async for message in messages:
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
                await asyncio.wait([writing])
                if not writing.cancelled():
                    writing.exception()  # the call says it
        return answer


class LinkWay:
    """By the link, on one connection after the other where they break. Large messages lie in memory of the server's."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        """path: where the server listens."""
        self._path, self._metadata = path, tuple(metadata)
        self._connection: LinkSocket[status_pb2.Status] | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> LinkWay:
        """Raises OSError, ValueError unless a server of the user that owns the socket's folder answers."""
        await self._connected()
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._connection is not None:
            self._connection.close(status_pb2.Status(code=code_pb2.CANCELLED))

    async def call(self, path: str, request: bytes, timeout_s: float) -> bytes:
        """As Way.call."""
        async with self._begun(path, timeout_s) as (connection, call, ended):
            connection.conversation.send(call, request, is_last=True)
            connection.flush()
            return await ended

    async def upload(self, path: str, messages: AsyncIterator[Message], timeout_s: float) -> bytes:
        """As Way.upload."""
        async with self._begun(path, timeout_s) as (connection, call, ended):
            async for message in messages:
                async with asyncio.timeout(PAUSE_S):
                    connection.conversation.send(call, await _placed(message, connection, ended))
                    connection.flush()
                    while call.outbox and not ended.done():
                        await connection.until_moved()
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
            connection = await self._connected()
        except (OSError, ValueError) as error:
            raise CallError(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="no server answers")) from error

        def end(error: status_pb2.Status | None) -> None:
            if not ended.done() and error is None:
                ended.set_result(b"".join(bodies))
            elif not ended.done() and error is not None:
                ended.set_exception(CallError(error))

        conversation = connection.conversation
        call = conversation.begin(path, bodies.append, end, timeout_s=timeout_s, metadata=self._metadata)
        try:
            async with asyncio.timeout(timeout_s):
                yield connection, call, ended
        finally:
            conversation.cancel(call)
            connection.flush()
            if ended.done() and not ended.cancelled():
                ended.exception()  # who asked may have gone

    async def _connected(self) -> LinkSocket[status_pb2.Status]:
        """A connection that is not over. Raises OSError, ValueError."""
        async with self._connecting:  # or each of several calls would make one
            if self._connection is None or self._connection.is_over:
                connected, welcome = await asyncio.to_thread(connect, self._path)
                self._connection = LinkSocket(connected, Conversation(welcome.message_bytes, lambda status: status))
            return self._connection


async def _within_pause(writing: asyncio.Future[None] | None) -> None:
    """Wait until a message is taken, if there is one. Raises TimeoutError; what writing it raises."""
    if writing is not None:
        async with asyncio.timeout(PAUSE_S):
            await writing


async def _placed(message: Message, connection: LinkSocket[status_pb2.Status], ended: asyncio.Future[bytes]) -> Content:
    """A message, which a thread has written into link memory where it is large. While the server reads it the next is
    written. As it is once the call has ended, and where it is too large for the server, which ends the call."""
    num_bytes, conversation = sum(map(len, message)), connection.conversation
    if not link.MAX_PACKET_BYTES <= num_bytes <= conversation.message_bytes:
        return message
    while not ended.done():
        room = conversation.room(num_bytes)
        if room is not None:
            await asyncio.to_thread(write_pieces, message, room)
            return room
        connection.flush()
        await connection.until_moved()
    return message


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """What a server has said."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            with suppress(DecodeError):
                return status_pb2.Status.FromString(value)
    return status_pb2.Status(code=error.code().value[0], message=error.details() or "")
