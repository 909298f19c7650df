"""Ports and sockets as the system sees them: what gRPC does not tell of them.

Knows addresses; not who wants to listen there.
"""

from __future__ import annotations

import socket


def why_not_bound(host: str, port: int) -> str:
    """Why nothing can listen on a port, in parentheses, as a plain socket tells it: gRPC does not."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return f" ({error.strerror})"
    return ""


def answers(path: str) -> bool:
    """Whether a process listens on a Unix socket; gRPC would take the socket of one that does."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
