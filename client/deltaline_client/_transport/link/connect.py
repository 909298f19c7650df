"""How a link begins: a socket to the right server, and its welcome."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from deltaline import link
from deltaline.link_socket import make_room
from deltaline_client._exceptions import Unavailable

WELCOME_TIMEOUT_S = 5.0

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


@dataclass(frozen=True)
class Where:
    """A link that a server has told of, or that the client was given. uid, server_epoch: whose it has to be; None for
    any server's of the user that owns the socket's folder."""

    path: str
    uid: int | None = None
    server_epoch: int | None = None


def connect(where: Where) -> tuple[socket.socket, link.Welcome]:
    """Connect, and wait for the welcome; blocks. Returns a socket that does not block. Raises Unavailable."""
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise Unavailable("this system has no local link") from error
    try:
        connected.settimeout(WELCOME_TIMEOUT_S)
        make_room(connected)
        connected.connect(where.path)
        _check_user(connected, where)
        welcome = _welcome(connected.recv(link.MAX_PACKET_BYTES))
        if where.server_epoch is not None and welcome.server_epoch != where.server_epoch:
            raise Unavailable("another server listens on this link")
    except (OSError, ValueError) as error:
        connected.close()
        raise Unavailable(f"no server answers on the local link: {error}") from error
    except Unavailable:
        connected.close()
        raise
    connected.setblocking(False)
    return connected, welcome


def _check_user(connected: socket.socket, where: Where) -> None:
    """Raise Unavailable unless the peer is the user that owns the folder, and so says what lies in it."""
    _, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    owner = os.stat(Path(where.path).parent).st_uid
    if uid != owner or where.uid not in (None, uid):
        expected = owner if where.uid is None else where.uid
        raise Unavailable(f"expected a server of the user {expected} on this link, got one of {uid}")


def _welcome(packet: bytes) -> link.Welcome:
    """Read the first packet. Raises Unavailable, LinkError."""
    envelope = link.read(memoryview(packet))
    body = packet[envelope.body_at :]
    if envelope.kind == link.GOODBYE:
        raise Unavailable(f"the server turned this client away: {body.decode(errors='replace')}")
    if envelope.kind != link.WELCOME:
        raise link.LinkError(f"expected a welcome, got the kind {envelope.kind}")
    welcome = link.Welcome.read(body)
    if welcome.version != link.VERSION:
        raise Unavailable(f"expected version {link.VERSION} of the link, got {welcome.version}")
    return welcome
