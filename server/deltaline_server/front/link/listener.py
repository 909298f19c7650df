"""The link's server: takes connections."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress

from deltaline import link
from deltaline.link_socket import make_room
from deltaline_server.front.link.connection import Connection, Served
from deltaline_server.front.link.socket_file import SocketFile
from deltaline_server.front.trust.peer import UID, Peer

MAX_CONNECTIONS = 256
# How long to wait when the process has no file descriptor to spare.
RETRY_ACCEPT_S = 0.1

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


class Listener:
    """Takes connections on a socket, from `serve` to `stop`; until then they wait. Belongs to the event loop."""

    def __init__(self, file: SocketFile | None) -> None:
        """file: None where there is no link."""
        self._file, self._connections = file, set[Connection]()
        self._retry: asyncio.TimerHandle | None = None

    @property
    def path(self) -> str:
        """The path of the socket, empty where there is none."""
        return "" if self._file is None else str(self._file.path)

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    def serve(self, served: Served) -> None:
        """Take connections."""
        if self._file is not None:
            self._served = served
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
        elif why := _why_no_room(connected):
            _turn_away(connected, why)
        else:
            # All connections of a process are one client, as those of a channel are.
            peer = Peer(f"link:{uid}:{pid}", {UID: (b"%d" % uid,)})
            connection = Connection(self._served, connected, peer, self._connections.discard)
            self._connections.add(connection)
            connection.start()


def _why_no_room(connected: socket.socket) -> str:
    """Why the link's packets can't go by a socket, "" where they can."""
    try:
        make_room(connected)
    except OSError as error:
        return f"on this server's host {error.strerror}"
    return ""


def _turn_away(connected: socket.socket, why: str) -> None:
    with connected, suppress(OSError):
        connected.send(link.pack(link.GOODBYE) + why.encode())
