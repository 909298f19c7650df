"""What carries a client's calls, for asyncio: gRPC, or the local link once it is found."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from deltaline.address import link_path, with_port
from deltaline.conversation import Region
from deltaline.tls import Tls, channel_of
from deltaline.wire import Buffer
from deltaline_client._exceptions import DeadlineExceeded, DeltalineError, Disconnected, Unavailable
from deltaline_client._transport.async_stream import AsyncStepStream, Mailbox
from deltaline_client._transport.channel import OPTIONS, bind, bind_stream, error_of
from deltaline_client._transport.flow import Answer, Call, Found, TakeMemory
from deltaline_client._transport.link.asynchronous import AsyncLink
from deltaline_client._transport.link.connect import Where, connect
from deltaline_client._transport.process import check_process
from deltaline_client._transport.token import Token
from deltaline_client._transport.tracing import metadata

_log = logging.getLogger(__name__)


class AsyncSession(Protocol):
    """What carries one flow, as transport.Session does for threads."""

    @property
    def is_over(self) -> bool:
        """Whether the flow has to go on with another session."""

    def send(self, number: int, request: Sequence[Buffer]) -> None:
        """Send a step; its answer comes under `number`."""

    async def receive(self, timeout_s: float) -> Answer | None:
        """The next answer to a step, None when the time is over."""

    async def call(self, command: Call) -> Any:
        """Make one attempt at a method. Raises DeltalineError."""

    async def memory(self, command: TakeMemory) -> Region | None:
        """Link memory, None where there is no link. Raises DeltalineError."""


class AsyncTransport:
    """Opens sessions. It belongs to the event loop in which it is first used."""

    def __init__(
        self,
        address: str,
        tls: Tls | None = None,
        token: Token | None = None,
        *,
        on_leave: Callable[[], object] = lambda: None,
    ) -> None:
        """address: of gRPC or of a link. on_leave: called when calls no longer go by a link that was found. Raises
        ValueError."""
        path, self._on_leave = link_path(address), on_leave
        self._tls, self.token = tls, token
        self._may_find = token is None and (tls is None or tls.cert is None)
        if tls is not None:
            tls.credentials()  # now, not at the first call, is when files that can't be used are told
        self._pid = os.getpid()
        self._where = None if path is None else Where(path)
        self._address = None if path is not None else with_port(address)
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, Any] = {}
        self._stream: AsyncStepStream | None = None
        self._link: AsyncLink | None = None
        self._connecting = asyncio.Lock()
        self.is_closed = False

    async def session(self) -> AsyncSession:
        """What carries a flow from now on. Raises RuntimeError in a forked process."""
        check_process(self._pid)
        if self.is_closed:
            return _NoSession(Disconnected())
        if self._link is not None and self._link.lacks_memory and self._address is not None:
            self._link = None
            self._give_up("the server gives it no memory")
        if self._where is not None:
            try:
                link = self._link
                return _LinkSession(await self._connected(self._where) if link is None or link.is_over else link)
            except DeltalineError as error:
                if self._address is None:
                    return _NoSession(error)
                self._give_up(error)
        if self._address is None:
            return _NoSession(Disconnected())
        if self._channel is None or self._stream is None:  # a grpc.aio channel must be made inside its event loop
            self._channel = channel_of(grpc.aio, self._address, self._tls, OPTIONS)
            self._methods = bind(self._channel)
            self._stream = AsyncStepStream(bind_stream(self._channel), self.token)
        return _GrpcSession(self, self._stream, self._methods)

    async def find(self, found: Found) -> bool:
        """Go by a link from now on, if it can be had; return whether."""
        where = Where(found.path, found.uid, found.server_epoch)
        if self._address is None or where == self._where or not self._may_find:
            return self._where is not None
        try:
            await self._connected(where)
        except DeltalineError as error:
            self._give_up(error)
            return False
        self._where = where
        _log.info("this client's calls go by the local link %s", found.path)
        return True

    async def close(self) -> None:
        """Close everything: calls under way and later ones end with Disconnected."""
        if self._stream is not None:
            await self._stream.close()
        self.is_closed = True
        if self._link is not None:
            self._link.close(Disconnected())
        if self._channel is not None:
            await self._channel.close()

    async def _connected(self, where: Where) -> AsyncLink:
        """The connection that all flows share. Raises Unavailable, Disconnected."""
        if self._link is not None and not self._link.is_over:
            return self._link
        async with self._connecting:
            if self._link is None or self._link.is_over:
                connected, welcome = await asyncio.to_thread(connect, where)
                if self.is_closed:
                    connected.close()
                    raise Disconnected
                self._link = AsyncLink(connected, welcome, self.token)
            return self._link

    def _give_up(self, why: object) -> None:
        """Go by gRPC from now on, until a link is found anew."""
        self._where = None
        self._on_leave()
        _log.info("no local link, calls go by gRPC: %s", why)


class _LinkSession:
    """The connection that all flows share."""

    def __init__(self, connection: AsyncLink) -> None:
        self._connection = connection
        self._mailbox = Mailbox()

    @property
    def is_over(self) -> bool:
        return self._connection.is_over and self._mailbox.is_empty()

    def send(self, number: int, request: Sequence[Buffer]) -> None:
        self._connection.send(number, request, self._mailbox)

    async def receive(self, timeout_s: float) -> Answer | None:
        return await self._mailbox.take(timeout_s)

    async def call(self, command: Call) -> Any:
        return await self._connection.call(command)

    async def memory(self, command: TakeMemory) -> Region | None:
        return await self._connection.memory(command.size_bytes, command.timeout_s)


class _GrpcSession:
    """The channel and the stream, which all flows share."""

    is_over = False

    def __init__(self, transport: AsyncTransport, stream: AsyncStepStream, methods: dict[str, Any]) -> None:
        self._transport, self._stream, self._methods = transport, stream, methods
        self._mailbox = Mailbox()

    def send(self, number: int, request: Sequence[Buffer]) -> None:
        self._stream.send(number, request, self._mailbox)

    async def receive(self, timeout_s: float) -> Answer | None:
        return await self._mailbox.take(timeout_s)

    async def call(self, command: Call) -> Any:
        try:
            return await self._answer(command)
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if not self._transport.is_closed or _is_cancelled():
                raise
            raise Disconnected from None

    async def memory(self, command: TakeMemory) -> Region | None:
        return None

    async def _answer(self, command: Call) -> Any:
        """Make one attempt at a method. Raises grpc.RpcError; TransportError for a stream of requests that broke."""
        method = self._methods[command.method.path]
        if command.take is not None:
            responses = method(command.request, timeout=command.timeout_s, metadata=metadata(self._transport.token))
            try:
                async for response in responses:
                    await asyncio.to_thread(command.take, response)  # it may write to a disk
            finally:
                responses.cancel()
            return None
        if isinstance(command.request, Message):
            return await method(command.request, timeout=command.timeout_s, metadata=metadata(self._transport.token))
        call = method(timeout=command.timeout_s, metadata=metadata(self._transport.token))
        try:
            # In a thread: the next request may have to be read from a disk first.
            while (request := await asyncio.to_thread(next, command.request, None)) is not None:
                await call.write(request)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call is over: awaiting it raises the reason
        except asyncio.CancelledError:
            call.cancel()
            raise
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            # A write that fails may put an error of grpc.aio's own in the place of the server's status, which is lost.
            if failure.code() is grpc.StatusCode.INTERNAL and not failure.trailing_metadata():
                if not call.time_remaining():
                    raise DeadlineExceeded("no answer in time") from failure
                raise Unavailable("the stream of requests broke") from failure
            raise


class _NoSession:
    """What a flow has where nothing can carry it now: the error, for everything."""

    def __init__(self, error: DeltalineError) -> None:
        self._error = error
        self._mailbox = Mailbox()

    @property
    def is_over(self) -> bool:
        return self._mailbox.is_empty()

    def send(self, number: int, request: Sequence[Buffer]) -> None:
        self._mailbox.put((number, self._error))

    async def receive(self, timeout_s: float) -> Answer | None:
        return await self._mailbox.take(timeout_s)

    async def call(self, command: Call) -> Any:
        raise self._error

    async def memory(self, command: TakeMemory) -> Region | None:
        raise self._error


def _is_cancelled() -> bool:
    """Whether the task is to end; else a CancelledError is that of a channel that was closed under its call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
