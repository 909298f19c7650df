"""How a link begins: a socket to the right server, and its welcome."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from deltaline import link, link_socket
from deltaline_client._exceptions import Unavailable


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
        return link_socket.connect(where.path, where.uid, where.server_epoch)
    except (OSError, ValueError) as error:
        raise Unavailable(f"no server answers on the local link: {error}") from error
