"""What carries a client's calls, for threads: gRPC, or the local link once it is found."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeAlias

import grpc

from deltaline.address import link_path
from deltaline.conversation import Region
from deltaline.tls import Tls
from deltaline.wire import Buffer
from deltaline_client._exceptions import DeltalineError, Disconnected
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.channels.channel import error_of
from deltaline_client._transport.channels.spread import Spread, check_channels
from deltaline_client._transport.channels.stream import Mailbox, StepStream
from deltaline_client._transport.channels.ways import Used, Ways
from deltaline_client._transport.flow import Answer, Call, Found, MayGo, Reroute, Server, TakeMemory
from deltaline_client._transport.link.blocking import BlockingLink
from deltaline_client._transport.link.connect import Where, connect
from deltaline_client._transport.process import forked

_log = logging.getLogger(__name__)

GrpcWays: TypeAlias = Ways[StepStream]
GrpcSpread: TypeAlias = Spread[StepStream]


class Session(Protocol):
    """What carries one flow. All but `call` and `memory` raise nothing: what failed is an answer."""

    @property
    def is_over(self) -> bool:
        """Whether the flow has to go on with another session: nothing is left to receive, and nothing more will be."""

    def send(self, number: int, request: Sequence[Buffer], server: Server) -> None:
        """Send a step to who holds its sequences; its answer comes under `number`."""

    def receive(self, timeout_s: float) -> Answer | None:
        """The next answer to a step, None when the time is over."""

    def call(self, command: Call) -> Any:
        """Make one attempt at a method. Raises DeltalineError."""

    def memory(self, command: TakeMemory) -> Region | None:
        """Link memory, None where there is no link. Raises DeltalineError."""

    def turn(self, command: Reroute) -> bool:
        """Go another way to a server from now on. Returns whether there is one."""

    def may_go(self, command: MayGo) -> bool:
        """Whether calls may go to a server that another has named."""

    def close(self) -> None:
        """The flow is over."""


class Transport:
    """Opens sessions; several threads may have one each."""

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
        make = partial(GrpcWays, grpc, StepStream, address, tls, servers, caller)
        self._spread = None if path is not None else GrpcSpread(make, channels)
        self._lock = threading.Lock()
        # Connections that no flow has, and all.
        self._free: list[BlockingLink] = []
        self._links: set[BlockingLink] = set()
        self._is_closed = False

    def session(self) -> Session:
        """What carries a flow from now on. Raises RuntimeError in a forked process."""
        if os.getpid() != self._pid:
            raise forked()
        where = self._where
        if where is not None and not self._is_closed:
            try:
                ways = None if self._spread is None else self._spread.first
                return _LinkSession(self, self._take(where), ways)
            except DeltalineError as error:
                if self._spread is None:
                    return _NoSession(error)
                self._give_up(error)
        if self._spread is None:
            return _NoSession(Disconnected())
        if self._spread.is_one:
            return _GrpcSession(self._spread.first)
        return _GrpcSession(self._spread.take(), self._spread)

    def find(self, found: Found) -> bool:
        """Go by a link from now on, if it can be had; return whether."""
        where = Where(found.path, found.uid, found.server_epoch)
        if self._spread is None or where == self._where or not self._may_find:
            return self._where is not None
        try:
            connection = self._take(where)
        except DeltalineError as error:
            self._give_up(error)
            return False
        self._where = where
        self.give_back(connection)
        _log.info("this client's calls go by the local link %s", found.path)
        return True

    def close(self) -> None:
        """Close everything: calls under way and later ones end with Disconnected."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
            links = list(self._links)
        for connection in links:
            connection.end(Disconnected())
        for connection in free:
            connection.close()
        if self._spread is not None:
            streams, channels = self._spread.end()
            for one in (*streams, *channels):
                one.close()

    def give_back(self, connection: BlockingLink) -> None:
        """A flow no longer needs a connection."""
        if connection.lacks_memory and self._spread is not None:
            self._give_up("the server gives it no memory")
        with self._lock:
            if not connection.is_over and not self._is_closed:
                self._free.append(connection)
                return
            # What broke one has likely broken all, which would cost an attempt each.
            ended, self._free = [connection, *self._free], []
            self._links.difference_update(ended)
        for one in ended:
            one.close()

    def _take(self, where: Where) -> BlockingLink:
        """A connection that no flow has. Raises Unavailable, Disconnected."""
        with self._lock:
            while self._free:
                connection = self._free.pop()
                if where.server_epoch in (None, connection.server_epoch):
                    return connection
                self._links.discard(connection)
                connection.close()
        connection = BlockingLink(*connect(where), self._caller)
        with self._lock:
            if not self._is_closed:
                self._links.add(connection)
                return connection
        connection.close()
        raise Disconnected

    def _give_up(self, why: object) -> None:
        """Go by gRPC from now on, until a link is found anew."""
        self._where = None
        self._on_leave()
        _log.info("no local link, calls go by gRPC: %s", why)


class _LinkSession:
    """A connection that this flow has for itself; beside it gRPC, for what other servers hold."""

    def __init__(self, transport: Transport, connection: BlockingLink, ways: GrpcWays | None) -> None:
        self._connection, self._ways, self._here = connection, ways, connection.server_epoch
        self._answers: deque[Answer] = deque()
        self._num_waiting = 0
        self._beside: _GrpcSession | None = None
        self.close = partial(transport.give_back, connection)

    @property
    def is_over(self) -> bool:
        return self._connection.is_over and not self._answers and self._beside is None

    def send(self, number: int, request: Sequence[Buffer], server: Server) -> None:
        if server.epoch != self._here and self._ways is not None:
            self._others(self._ways).send(number, request, server)
        else:
            self._num_waiting += 1
            self._connection.send(number, request, self._answers)

    def receive(self, timeout_s: float) -> Answer | None:
        if self._beside is not None and not self._num_waiting:
            return self._beside.receive(timeout_s)
        answer = self._connection.receive(self._answers, timeout_s)
        self._num_waiting -= answer is not None
        return answer

    def call(self, command: Call) -> Any:
        server = command.server
        if server is not None and server.epoch != self._here and self._ways is not None:
            return self._others(self._ways).call(command)
        return self._connection.call(command)

    def memory(self, command: TakeMemory) -> Region | None:
        if command.server.epoch != self._here:
            return None
        return self._connection.memory(command.size_bytes, command.timeout_s)

    def turn(self, command: Reroute) -> bool:
        if command.server.epoch == self._here and self._connection.is_over and self._ways is not None:
            self._here = 0  # gRPC beside it goes on with all
            return True
        return self._beside is not None and self._beside.turn(command)

    def may_go(self, command: MayGo) -> bool:
        return command.server.epoch == self._here or (self._ways is not None and self._ways.may_go(command.server.name))

    def _others(self, ways: GrpcWays) -> _GrpcSession:
        if self._beside is None:
            self._beside = _GrpcSession(ways)
        return self._beside


class _GrpcSession:
    """Channels and streams, which flows share."""

    is_over = False

    def __init__(self, ways: GrpcWays, spread: GrpcSpread | None = None) -> None:
        """spread: where the ways go back to, None for those that were not taken."""
        self._ways, self._spread = ways, spread
        self._mailbox: Mailbox = queue.SimpleQueue()
        self._used: dict[str, Used[StepStream]] = {}

    def send(self, number: int, request: Sequence[Buffer], server: Server) -> None:
        try:
            way = self._ways.current.get(server.name) or self._ways.to(server.name)
        except Disconnected as error:
            self._mailbox.put((number, error))
        else:
            self._used[server.name] = way, time.monotonic()
            way.stream.send(number, request, self._mailbox)

    def receive(self, timeout_s: float) -> Answer | None:
        with suppress(queue.Empty):
            return self._mailbox.get(timeout=timeout_s)
        return None

    def call(self, command: Call) -> Any:
        name = "" if command.server is None else command.server.name
        way = self._ways.to(name)
        self._used[name] = way, time.monotonic()
        method = way.methods[command.method.path]
        try:
            metadata = self._ways.caller.metadata(command.server)
            made = method(command.request, timeout=command.timeout_s, metadata=metadata)
            if command.take is not None:
                _take_all(made, command.take)
                made = None
            way.has_answered = True
            return made
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except ValueError:  # what grpc raises on a channel that is closed
            raise Disconnected from None

    def memory(self, command: TakeMemory) -> Region | None:
        return None

    def turn(self, command: Reroute) -> bool:
        used = self._used.get(command.server.name)
        return used is not None and self._ways.turn(used, command.came_elsewhere)

    def may_go(self, command: MayGo) -> bool:
        return self._ways.may_go(command.server.name)

    def close(self) -> None:
        if self._spread is not None:
            self._spread.give_back(self._ways)


def _take_all(responses: Any, take: Callable[[Any], object]) -> None:
    """Let all responses of a call be taken. Raises grpc.RpcError, and what `take` raises."""
    try:
        for response in responses:
            take(response)
    finally:
        responses.cancel()


class _NoSession:
    """What a flow has where nothing can carry it now: the error, for everything."""

    def __init__(self, error: DeltalineError) -> None:
        self._error = error
        self._answers: deque[Answer] = deque()

    @property
    def is_over(self) -> bool:
        return not self._answers

    def send(self, number: int, request: Sequence[Buffer], server: Server) -> None:
        self._answers.append((number, self._error))

    def receive(self, timeout_s: float) -> Answer | None:
        return self._answers.popleft() if self._answers else None

    def call(self, command: Call) -> Any:
        raise self._error

    def memory(self, command: TakeMemory) -> Region | None:
        raise self._error

    def turn(self, command: Reroute) -> bool:
        return False

    def may_go(self, command: MayGo) -> bool:
        return False

    def close(self) -> None:
        pass
