"""What carries a client's calls, for asyncio: gRPC, or the local link once it is found."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from deltaline.address import link_path
from deltaline.conversation import Region
from deltaline.tls import Tls
from deltaline.wire import Buffer
from deltaline_client._exceptions import DeadlineExceeded, DeltalineError, Disconnected, Unavailable
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.channels.async_stream import AsyncStepStream, Mailbox
from deltaline_client._transport.channels.channel import error_of
from deltaline_client._transport.channels.spread import Spread, check_channels
from deltaline_client._transport.channels.ways import Used, Ways
from deltaline_client._transport.flow import Answer, Call, Found, MayGo, Reroute, Server, TakeMemory
from deltaline_client._transport.link.asynchronous import AsyncLink
from deltaline_client._transport.link.connect import Where, connect
from deltaline_client._transport.process import forked

_log = logging.getLogger(__name__)

AioWays: TypeAlias = Ways[AsyncStepStream]
AioSpread: TypeAlias = Spread[AsyncStepStream]


class AsyncSession(Protocol):
    """What carries one flow, as transport.Session does for threads."""

    @property
    def is_over(self) -> bool:
        """Whether the flow has to go on with another session."""

    def send(self, number: int, request: Sequence[Buffer], server: Server) -> None:
        """Send a step to who holds its sequences; its answer comes under `number`."""

    async def receive(self, timeout_s: float) -> Answer | None:
        """The next answer to a step, None when the time is over."""

    async def call(self, command: Call) -> Any:
        """Make one attempt at a method. Raises DeltalineError."""

    async def memory(self, command: TakeMemory) -> Region | None:
        """Link memory, None where there is no link. Raises DeltalineError."""

    def turn(self, command: Reroute) -> bool:
        """Go another way to a server from now on. Returns whether there is one."""

    def may_go(self, command: MayGo) -> bool:
        """Whether calls may go to a server that another has named."""

    def close(self) -> None:
        """The flow is over."""


class AsyncTransport:
    """Opens sessions. It belongs to the event loop in which it is first used."""

    def __init__(
        self,
        address: str,
        tls: Tls | None = None,
        caller: Caller | None = None,
        servers: Iterable[str] | None = None,
        channels: int = 1,
        *,
        on_leave: Callable[[], object] = lambda: None,
    ) -> None:
        """address: of gRPC or of a link. servers: see Ways. channels: of gRPC, to each server. on_leave: called when
        calls no longer go by a link that was found. Raises ValueError."""
        check_channels(channels)
        path, self._on_leave = link_path(address), on_leave
        self._caller = caller = caller or Caller()
        self._may_find = caller.token is None and (tls is None or tls.cert is None)
        self._pid = os.getpid()
        self._where = None if path is None else Where(path)
        make = partial(AioWays, grpc.aio, AsyncStepStream, address, tls, servers, caller)
        self._spread = None if path is not None else AioSpread(make, channels)
        self._link: AsyncLink | None = None
        self._connecting = asyncio.Lock()
        self.is_closed = False

    async def session(self) -> AsyncSession:
        """What carries a flow from now on. Raises RuntimeError in a forked process."""
        if os.getpid() != self._pid:
            raise forked()
        if self.is_closed:
            return _NoSession(Disconnected())
        if self._link is not None and self._link.lacks_memory and self._spread is not None:
            self._link = None
            self._give_up("the server gives it no memory")
        if self._where is not None:
            try:
                ways = None if self._spread is None else self._spread.first
                return _LinkSession(await self._connected(self._where), self, ways)
            except DeltalineError as error:
                if self._spread is None:
                    return _NoSession(error)
                self._give_up(error)
        if self._spread is None:
            return _NoSession(Disconnected())
        if self._spread.is_one:
            return _GrpcSession(self, self._spread.first)
        return _GrpcSession(self, self._spread.take(), spread=self._spread)

    async def find(self, found: Found) -> bool:
        """Go by a link from now on, if it can be had; return whether."""
        where = Where(found.path, found.uid, found.server_epoch)
        if self._spread is None or where == self._where or not self._may_find:
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
        streams, channels = ([], []) if self._spread is None else self._spread.end()
        for stream in streams:
            await stream.close()
        self.is_closed = True
        if self._link is not None:
            self._link.close(Disconnected())
        for channel in channels:
            await channel.close()

    async def _connected(self, where: Where) -> AsyncLink:
        """The connection that all flows share. Raises Unavailable, Disconnected."""
        if self._link is not None and self._link.is_to(where):
            return self._link
        async with self._connecting:
            if self._link is None or not self._link.is_to(where):
                connected, welcome = await asyncio.to_thread(connect, where)
                if self.is_closed:
                    connected.close()
                    raise Disconnected
                if self._link is not None:
                    self._link.close(Unavailable("the local link of another server took its place"))
                self._link = AsyncLink(connected, welcome, self._caller)
            return self._link

    def _give_up(self, why: object) -> None:
        """Go by gRPC from now on, until a link is found anew."""
        self._where = None
        self._on_leave()
        _log.info("no local link, calls go by gRPC: %s", why)


class _LinkSession:
    """The connection that all flows share; beside it gRPC, for what other servers hold."""

    def __init__(self, connection: AsyncLink, transport: AsyncTransport, ways: AioWays | None) -> None:
        self._connection, self._transport, self._ways = connection, transport, ways
        self._here = connection.server_epoch
        self._mailbox = Mailbox()
        self._beside: _GrpcSession | None = None

    @property
    def is_over(self) -> bool:
        return self._connection.is_over and self._mailbox.is_empty() and self._beside is None

    def send(self, number: int, request: Sequence[Buffer], server: Server) -> None:
        if server.epoch != self._here and self._ways is not None:
            self._others(self._ways).send(number, request, server)
        else:
            self._connection.send(number, request, self._mailbox)

    async def receive(self, timeout_s: float) -> Answer | None:
        return await self._mailbox.take(timeout_s)

    async def call(self, command: Call) -> Any:
        server = command.server
        if server is not None and server.epoch != self._here and self._ways is not None:
            return await self._others(self._ways).call(command)
        return await self._connection.call(command)

    async def memory(self, command: TakeMemory) -> Region | None:
        if command.server.epoch != self._here:
            return None
        return await self._connection.memory(command.size_bytes, command.timeout_s)

    def turn(self, command: Reroute) -> bool:
        if command.server.epoch == self._here and self._connection.is_over and self._ways is not None:
            self._here = 0  # gRPC beside it goes on with all
            return True
        return self._beside is not None and self._beside.turn(command)

    def may_go(self, command: MayGo) -> bool:
        return command.server.epoch == self._here or (self._ways is not None and self._ways.may_go(command.server.name))

    def close(self) -> None:
        pass

    def _others(self, ways: AioWays) -> _GrpcSession:
        if self._beside is None:
            self._beside = _GrpcSession(self._transport, ways, self._mailbox)
        return self._beside


class _GrpcSession:
    """Channels and streams, which flows share."""

    is_over = False

    def __init__(
        self, transport: AsyncTransport, ways: AioWays, mailbox: Mailbox | None = None, spread: AioSpread | None = None
    ) -> None:
        """spread: where the ways go back to, None for those that were not taken."""
        self._transport, self._ways, self._spread = transport, ways, spread
        self._mailbox = mailbox or Mailbox()
        self._used: dict[str, Used[AsyncStepStream]] = {}

    def send(self, number: int, request: Sequence[Buffer], server: Server) -> None:
        try:
            way = self._ways.current.get(server.name) or self._ways.to(server.name)
        except Disconnected as error:
            self._mailbox.put((number, error))
        else:
            self._used[server.name] = way, time.monotonic()
            way.stream.send(number, request, self._mailbox)

    async def receive(self, timeout_s: float) -> Answer | None:
        return await self._mailbox.take(timeout_s)

    async def call(self, command: Call) -> Any:
        name = "" if command.server is None else command.server.name
        way = self._ways.to(name)
        self._used[name] = way, time.monotonic()
        try:
            made = await self._answer(command, way.methods[command.method.path])
            way.has_answered = True
            return made
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if not self._transport.is_closed or _is_cancelled():
                raise
            raise Disconnected from None

    async def memory(self, command: TakeMemory) -> Region | None:
        return None

    def turn(self, command: Reroute) -> bool:
        used = self._used.get(command.server.name)
        return used is not None and self._ways.turn(used, command.came_elsewhere)

    def may_go(self, command: MayGo) -> bool:
        return self._ways.may_go(command.server.name)

    def close(self) -> None:
        if self._spread is not None:
            self._spread.give_back(self._ways)

    async def _answer(self, command: Call, method: Any) -> Any:
        """Make one attempt at a method. Raises grpc.RpcError; TransportError for a stream of requests that broke."""
        metadata = self._ways.caller.metadata(command.server)
        if command.take is not None:
            responses = method(command.request, timeout=command.timeout_s, metadata=metadata)
            try:
                async for response in responses:
                    await asyncio.to_thread(command.take, response)  # it may write to a disk
            finally:
                responses.cancel()
            return None
        if isinstance(command.request, Message):
            return await method(command.request, timeout=command.timeout_s, metadata=metadata)
        call = method(timeout=command.timeout_s, metadata=metadata)
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

    def send(self, number: int, request: Sequence[Buffer], server: Server) -> None:
        self._mailbox.put((number, self._error))

    async def receive(self, timeout_s: float) -> Answer | None:
        return await self._mailbox.take(timeout_s)

    async def call(self, command: Call) -> Any:
        raise self._error

    async def memory(self, command: TakeMemory) -> Region | None:
        raise self._error

    def turn(self, command: Reroute) -> bool:
        return False

    def may_go(self, command: MayGo) -> bool:
        return False

    def close(self) -> None:
        pass


def _is_cancelled() -> bool:
    """Whether the task is to end; else a CancelledError is that of a channel that was closed under its call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
