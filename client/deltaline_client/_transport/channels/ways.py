"""A client's ways to servers by gRPC: at the address that it was given, and at those of servers that it follows.

A server tells its name, an address, when it opens something, and calls about that go there, if the client may: without
TLS to the addresses that it was given for that, or as targets of moves, with TLS wherever the certificate is one for
that host by the same authorities, which gRPC sees to. Where that can't be reached calls go to the address that the
client was given, whose owner may route them by the name that they carry; and where this fails, back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from deltaline.address import is_host_and_port, with_port
from deltaline.tls import Tls, channel_of
from deltaline_client._exceptions import Disconnected
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.channels.channel import Options, bind, bind_stream
from deltaline_client._transport.token import is_on_host

_log = logging.getLogger(__name__)


class Stream(Protocol):
    """What a way needs of its stream of steps. has_answered: whether an answer has ever come by it."""

    has_answered: bool

    def leave(self) -> None:
        """Let the next step open another stream."""


S = TypeVar("S", bound=Stream)

# A way that fails twice within this time is left for the other one.
AGAIN_S = 60.0


@dataclass(eq=False, slots=True)
class Way(Generic[S]):
    """How calls about a server go. server: its name, which they carry, "" for any. methods: by path. is_direct: at its
    own address. failed_s: when it failed last. has_answered: whether a call by it has ever ended well."""

    server: str
    is_direct: bool
    methods: dict[str, Any]
    stream: S
    failed_s: float = -inf
    has_answered: bool = False


Used: TypeAlias = tuple[Way[S], float]
"""A way, and when an attempt began to go by it, monotonic seconds."""


class Ways(Generic[S]):
    """The ways of one client, the caller, to servers by their names. Threads may share it.

    current: the way of each server that calls go by now.
    """

    def __init__(
        self,
        api: Any,
        make_stream: Callable[[Any, Caller, str], S],
        address: str,
        tls: Tls | None,
        servers: Iterable[str] | None,
        caller: Caller,
        options: Options,
    ) -> None:
        """api: grpc or grpc.aio. servers: which may be followed; None for all that verify, none without TLS. options:
        of its channels.

        Raises ValueError for files that can't be used, for what is no address, and for one to which a token would go in
        plaintext; TypeError for servers that are no texts.
        """
        if tls is not None:
            tls.credentials()  # now, not at the first call, is when files that can't be used are told
        self._api, self._make_stream, self._tls, self.caller, self._options = api, make_stream, tls, caller, options
        self._address = with_port(address)
        self._servers = None if servers is None else frozenset(map(with_port, _addresses(servers)))
        if caller.token is not None and tls is None:
            for server in self._servers or ():
                caller.token.check(server)
        self._lock = threading.Lock()
        self.current: dict[str, Way[S]] = {}
        self._made: dict[tuple[str, bool], Way[S]] = {}
        self._channels: dict[str, Any] = {}
        self._is_closed = False

    def to(self, server: str) -> Way[S]:
        """The way to a server, by its name, "" for any. Raises Disconnected."""
        with self._lock:
            way = self.current.get(server)
            if way is None:
                way = self.current[server] = self._way(server, self._may_follow(server))
        return way

    def turn(self, used: Used[S], came_elsewhere: bool) -> bool:
        """An attempt failed on its way: calls about that server go by the other one from now on. Returns whether there
        is another.

        came_elsewhere: it leads to another server, and a stream does so for as long as it lasts. Else it is tried once
        more before it is left: a connection that lasted may have come to its age. Not so a way that has never
        answered: the name may not be reached from here, or its server have no certificate for it.
        """
        (failed, begin_s), now_s = used, time.monotonic()
        server = failed.server
        if came_elsewhere:
            failed.stream.leave()
        if not self._may_follow(server):
            return False
        with self._lock:
            is_known = begin_s < failed.failed_s  # as another call's that failed with it
            is_new = now_s - failed.failed_s > AGAIN_S
            if not is_known:
                failed.failed_s = now_s
            may_be_old = failed.has_answered or failed.stream.has_answered
            if not came_elsewhere and (is_known or (is_new and may_be_old)):
                return True
            if self.current.get(server) is failed:  # else another call was first
                self.current[server] = way = self._way(server, not failed.is_direct)
                if way.is_direct is not failed.is_direct:
                    _log.info("calls about %s go %s", server, "there" if way.is_direct else f"to {self._address}")
        return True

    def end(self) -> tuple[list[S], list[Any]]:
        """Make no more of them. Returns the streams and the channels, to be closed in this order."""
        with self._lock:
            self._is_closed = True
            return [way.stream for way in self._made.values()], list(self._channels.values())

    def may_go(self, server: str) -> bool:
        """Whether calls may go to a server by its name: to the address that the client was given, or where it may
        follow."""
        return server == self._address or self._may_follow(server)

    def _may_follow(self, server: str) -> bool:
        """Whether calls may go to a server's own address, and that is another than the client was given.

        A token goes to one that a move named as to those that were given: without TLS on this host alone.
        """
        if server in ("", self._address):
            return False
        if self._servers is not None and server in self._servers:
            return True
        is_named = server in self.caller.named
        if self._tls is None:
            is_named = is_named and (self.caller.token is None or is_on_host(server))
        elif self._servers is None:
            return is_host_and_port(server)
        return is_named and is_host_and_port(server)

    def _way(self, server: str, is_direct: bool) -> Way[S]:
        """A way, made once. The caller has the lock. Raises Disconnected."""
        if self._is_closed:
            raise Disconnected
        made = self._made.get((server, is_direct))
        if made is None:
            try:
                channel = self._channel(server if is_direct else self._address, is_direct)
            except ValueError as error:  # the files were good when the client was made
                if not is_direct:
                    raise
                _log.warning("%s can't be followed: %s", server, error)
                return self._way(server, False)
            stream = self._make_stream(bind_stream(channel), self.caller, server)
            made = self._made[server, is_direct] = Way(server, is_direct, bind(channel), stream)
        return made

    def _channel(self, address: str, is_direct: bool) -> Any:
        found = self._channels.get(address)
        if found is None:
            # The name that the given address is excused by is not one of others.
            tls = self._tls if self._tls is None or not is_direct else replace(self._tls, server_name=None)
            found = self._channels[address] = channel_of(self._api, address, tls, self._options)
        return found


def _addresses(servers: Iterable[str]) -> list[str]:
    """The addresses to follow. Raises ValueError, TypeError."""
    if isinstance(servers, str):
        raise ValueError(f"servers: expected several addresses, got the text {servers!r}")
    if not isinstance(servers, Iterable):
        raise TypeError(f"servers: expected addresses, got {type(servers).__name__}")
    found = list(servers)
    for index, server in enumerate(found):
        if not isinstance(server, str):
            raise TypeError(f"servers[{index}]: expected an address, got {type(server).__name__}")
    return found
