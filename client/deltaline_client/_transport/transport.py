"""What carries a client's calls, for threads: gRPC, or the local link once it is found."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import grpc

from deltaline.address import link_path, with_port
from deltaline.conversation import Region
from deltaline.tls import Tls, channel_of
from deltaline.wire import Buffer
from deltaline_client._exceptions import DeltalineError, Disconnected
from deltaline_client._transport.channel import OPTIONS, bind, bind_stream, error_of
from deltaline_client._transport.flow import Answer, Call, Found, TakeMemory
from deltaline_client._transport.link.blocking import BlockingLink
from deltaline_client._transport.link.connect import Where, connect
from deltaline_client._transport.process import check_process
from deltaline_client._transport.stream import Mailbox, StepStream
from deltaline_client._transport.token import Token
from deltaline_client._transport.tracing import metadata

_log = logging.getLogger(__name__)


class Session(Protocol):
    """What carries one flow. All but `call` and `memory` raise nothing: what failed is an answer."""

    @property
    def is_over(self) -> bool:
        """Whether the flow has to go on with another session: nothing is left to receive, and nothing more will be."""

    def send(self, number: int, request: Sequence[Buffer]) -> None:
        """Send a step; its answer comes under `number`."""

    def receive(self, timeout_s: float) -> Answer | None:
        """The next answer to a step, None when the time is over."""

    def call(self, command: Call) -> Any:
        """Make one attempt at a method. Raises DeltalineError."""

    def memory(self, command: TakeMemory) -> Region | None:
        """Link memory, None where there is no link. Raises DeltalineError."""

    def close(self) -> None:
        """The flow is over."""


class Transport:
    """Opens sessions; several threads may have one each."""

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
        self._token, self._may_find = token, token is None and (tls is None or tls.cert is None)
        self._pid = os.getpid()
        self._where = None if path is None else Where(path)
        self._channel = None if path is not None else channel_of(grpc, with_port(address), tls, OPTIONS)
        self._methods = {} if self._channel is None else bind(self._channel)
        self._stream = None if self._channel is None else StepStream(bind_stream(self._channel), token)
        self._lock = threading.Lock()
        # Connections that no flow has, and all.
        self._free: list[BlockingLink] = []
        self._links: set[BlockingLink] = set()
        self._is_closed = False

    def session(self) -> Session:
        """What carries a flow from now on. Raises RuntimeError in a forked process."""
        check_process(self._pid)
        where = self._where
        if where is not None and not self._is_closed:
            try:
                return _LinkSession(self, self._take(where))
            except DeltalineError as error:
                if self._stream is None:
                    return _NoSession(error)
                self._give_up(error)
        if self._stream is None:
            return _NoSession(Disconnected())
        return _GrpcSession(self._stream, self._methods, self._token)

    def find(self, found: Found) -> bool:
        """Go by a link from now on, if it can be had; return whether."""
        where = Where(found.path, found.uid, found.server_epoch)
        if self._stream is None or where == self._where or not self._may_find:
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
        if self._stream is not None and self._channel is not None:
            self._stream.close()
            self._channel.close()

    def give_back(self, connection: BlockingLink) -> None:
        """A flow no longer needs a connection."""
        if connection.lacks_memory and self._stream is not None:
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
            if self._free:
                return self._free.pop()
        connection = BlockingLink(*connect(where), self._token)
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
    """A connection that this flow has for itself."""

    def __init__(self, transport: Transport, connection: BlockingLink) -> None:
        self._connection = connection
        self._answers: deque[Answer] = deque()
        self.send = partial(connection.send, answers=self._answers)
        self.receive = partial(connection.receive, self._answers)
        self.close = partial(transport.give_back, connection)

    @property
    def is_over(self) -> bool:
        return self._connection.is_over and not self._answers

    def call(self, command: Call) -> Any:
        return self._connection.call(command)

    def memory(self, command: TakeMemory) -> Region | None:
        return self._connection.memory(command.size_bytes, command.timeout_s)


class _GrpcSession:
    """The channel and the stream, which all flows share."""

    is_over = False

    def __init__(self, stream: StepStream, methods: dict[str, Any], token: Token | None) -> None:
        self._methods, self._token = methods, token
        self._mailbox: Mailbox = queue.SimpleQueue()
        self.send = partial(stream.send, mailbox=self._mailbox)

    def receive(self, timeout_s: float) -> Answer | None:
        with suppress(queue.Empty):
            return self._mailbox.get(timeout=timeout_s)
        return None

    def call(self, command: Call) -> Any:
        method = self._methods[command.method.path]
        try:
            made = method(command.request, timeout=command.timeout_s, metadata=metadata(self._token))
            if command.take is None:
                return made
            return _take_all(made, command.take)
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except ValueError:  # what grpc raises on a channel that is closed
            raise Disconnected from None

    def memory(self, command: TakeMemory) -> Region | None:
        return None

    def close(self) -> None:
        pass


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

    def send(self, number: int, request: Sequence[Buffer]) -> None:
        self._answers.append((number, self._error))

    def receive(self, timeout_s: float) -> Answer | None:
        return self._answers.popleft() if self._answers else None

    def call(self, command: Call) -> Any:
        raise self._error

    def memory(self, command: TakeMemory) -> Region | None:
        raise self._error

    def close(self) -> None:
        pass
