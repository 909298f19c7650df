"""Ways to call a server with raw bytes: gRPC, with TLS too, and the local link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import status_pb2
from grpc_status import rpc_status
from rigs.layer_calls import UNTOLD
from rigs.raw_link import connected_socket

from deltaline import link
from deltaline.conversation import Conversation
from deltaline.link_socket import LinkSocket

CODES = {code.value[0]: code for code in grpc.StatusCode}


class Said(NamedTuple):
    """What a call said. status: None where it ended well, or without one."""

    code: grpc.StatusCode
    text: str
    replies: Sequence[bytes]
    status: status_pb2.Status | None = None


class Way(Protocol):
    """A connection that calls go by."""

    async def call(self, method: MethodDescriptor, bodies: Sequence[bytes], metadata: Any, timeout_s: float) -> Said:
        """Make a call with these messages."""


class GrpcWay:
    """A channel."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._made: dict[str, Any] = {}

    async def call(self, method: MethodDescriptor, bodies: Sequence[bytes], metadata: Any, timeout_s: float) -> Said:
        while True:
            said = await self._call(method, bodies, metadata, timeout_s)
            if said.text != UNTOLD:
                return said
            timeout_s = 60.0  # the next time it is to be told

    async def _call(self, method: MethodDescriptor, bodies: Sequence[bytes], metadata: Any, timeout_s: float) -> Said:
        multicallable = self._made.get(method.full_name) or self._make(method)
        requests = iter(bodies) if method.client_streaming else bodies[0]
        call = multicallable(requests, metadata=metadata, timeout=timeout_s)
        replies: list[bytes] = []
        try:
            if method.server_streaming:
                async for reply in call:
                    replies.append(reply)
            else:
                replies.append(await call)
        except grpc.aio.AioRpcError as error:
            return Said(error.code(), error.details() or "", replies, _status_of(error))
        return Said(grpc.StatusCode.OK, "", replies)

    def _make(self, method: MethodDescriptor) -> Any:
        kinds = ("unary", "stream")
        name = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
        path = f"/{method.containing_service.full_name}/{method.name}"
        self._made[method.full_name] = made = getattr(self._channel, name)(path)
        return made


def _status_of(error: grpc.aio.AioRpcError) -> Any:
    """The status in a call's trailers; None where there is none, or its own deadline was over as that came."""
    try:
        return rpc_status.from_call(error)
    except ValueError:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return None


class LinkWay:
    """A connection of the local link."""

    def __init__(self, connected: LinkSocket[status_pb2.Status]) -> None:
        self._socket = connected

    async def call(self, method: MethodDescriptor, bodies: Sequence[bytes], metadata: Any, timeout_s: float) -> Said:
        replies: list[bytes] = []
        ended: asyncio.Future[status_pb2.Status | None] = asyncio.get_running_loop().create_future()

        def end(status: status_pb2.Status | None) -> None:
            if not ended.done():
                ended.set_result(status)

        conversation = self._socket.conversation
        assert conversation.error is None, f"the link broke: {conversation.error}"
        path = f"/{method.containing_service.full_name}/{method.name}"
        texts = tuple((name, value) for name, value in metadata if isinstance(value, str))
        call = conversation.begin(path, replies.append, end, timeout_s=timeout_s, metadata=texts)
        for body in bodies[:-1]:
            conversation.send(call, body)
        conversation.send(call, bodies[-1] if bodies else None, is_last=True)
        self._socket.flush()
        status = await ended
        if status is None or not status.code:
            return Said(grpc.StatusCode.OK, "", replies)
        return Said(CODES[status.code], status.message, replies, status)


@asynccontextmanager
async def link_way(path: str) -> AsyncIterator[LinkWay]:
    """A connection of the link at a path."""
    connected = await asyncio.to_thread(connected_socket, path)
    welcome = link.Welcome.read((await asyncio.to_thread(connected.recv, link.MAX_PACKET_BYTES))[link.ENVELOPE.size :])
    connected.setblocking(False)
    carried = LinkSocket(connected, Conversation(welcome.message_bytes, lambda status: status))
    try:
        yield LinkWay(carried)
    finally:
        carried.close(status_pb2.Status(code=1, message="the test is over"))


@asynccontextmanager
async def grpc_way(channel: Any) -> AsyncIterator[GrpcWay]:
    """A channel, closed at the end."""
    async with channel:
        yield GrpcWay(channel)
