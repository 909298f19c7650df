"""The link's server: takes connections, and finds the handlers of their calls."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from deltaline import link
from deltaline_server.front.interceptor import Interceptor
from deltaline_server.front.link.connection import Connection, Served
from deltaline_server.front.link.held import Held
from deltaline_server.front.link.socket_file import SocketFile
from deltaline_server.memory.regions import Regions
from deltaline_server.scheduling.observer import Observer

MAX_CONNECTIONS = 256
# Of replies that are not read and of messages that wait for handlers, all connections together.
HELD_BYTES = 256 * 2**20
# How long to wait when the process has no file descriptor to spare.
RETRY_ACCEPT_S = 0.1

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


@dataclass(frozen=True)
class _Details(grpc.HandlerCallDetails):
    """What a handler is looked up by."""

    method: str
    invocation_metadata: tuple[()] = ()


class Listener:
    """Takes connections on a socket, from `serve` to `stop`; until then they wait. Belongs to the event loop."""

    def __init__(self, file: SocketFile | None) -> None:
        """file: None where there is no link."""
        self._file, self._connections = file, set[Connection]()
        self._wrapped: dict[bytes, Any] = {}
        self._retry: asyncio.TimerHandle | None = None

    @property
    def path(self) -> str:
        """The path of the socket, empty where there is none."""
        return "" if self._file is None else str(self._file.path)

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def serve(
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        interceptor: Interceptor,
        *,
        regions: Regions,
        observer: Observer,
        server_epoch: int,
        message_bytes: int,
    ) -> None:
        """Take connections. handlers: of the services, as gRPC gets them. regions: link memory. message_bytes: most
        bytes of a request."""
        if self._file is None:
            return
        self._handlers, self._interceptor = handlers, interceptor
        buffer, held = memoryview(bytearray(link.MAX_PACKET_BYTES)), Held(HELD_BYTES)
        self._served = Served(self._find, regions, held, observer, server_epoch, message_bytes, buffer)
        self._listen(self._file)

    async def stop(self, grace_s: float) -> None:
        """Take no new connections and calls, give those in flight so many seconds, and end all. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        file, self._file = self._file, None
        if file is not None:
            asyncio.get_running_loop().remove_reader(file.socket)
            file.close()
        for connection in self._connections:
            connection.stop()
        tasks = [task for connection in self._connections for task in connection.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for connection in list(self._connections):
            connection.end("the server stops")
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, method: bytes) -> Any:
        """The wrapped handler of a method, None for an unknown one."""
        found = self._wrapped.get(method)
        if found is None:
            name = method.decode(errors="replace")
            handler = next(filter(None, (one.service(_Details(name)) for one in self._handlers)), None)
            if handler is not None:
                self._wrapped[method] = found = self._interceptor.wrap(handler, name)
        return found

    def _listen(self, file: SocketFile) -> None:
        asyncio.get_running_loop().add_reader(file.socket, self._accept, file)

    def _accept(self, file: SocketFile) -> None:
        try:
            connected, _ = file.socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor to spare: what waits stays in the backlog
            loop = asyncio.get_running_loop()
            loop.remove_reader(file.socket)
            self._retry = loop.call_later(RETRY_ACCEPT_S, self._listen, file)
            return
        connected.setblocking(False)
        pid, uid, _ = _CREDENTIALS.unpack(
            connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.geteuid() and not file.is_for_group:
            _turn_away(connected, "this server's link is for its own user")
        elif len(self._connections) == MAX_CONNECTIONS:
            _turn_away(connected, f"the server has {MAX_CONNECTIONS} connections, which is the most")
        else:
            # All connections of a process are one client, as those of a channel are.
            connection = Connection(self._served, connected, f"link:{uid}:{pid}", self._connections.discard)
            self._connections.add(connection)
            connection.start()


def _turn_away(connected: socket.socket, why: str) -> None:
    with connected, suppress(OSError):
        connected.send(link.pack(link.GOODBYE) + why.encode())
