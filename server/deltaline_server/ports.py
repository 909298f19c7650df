"""Ports and sockets as the system sees them, where gRPC says nothing."""

from __future__ import annotations

import errno
import socket


def system_reason(error: OSError, flag: str) -> str:
    """What the system says of a port, in parentheses, and what to do when it is in use; `flag` is the port's."""
    hint = f": another server runs there; stop it, or give {flag}" if error.errno == errno.EADDRINUSE else ""
    return f" ({error.strerror}){hint}"


def why_not_bound(host: str, port: int) -> str:
    """Why nothing can listen on the port of --port, as a plain socket reports it; gRPC does not."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return system_reason(error, "--port")
    return ""


def answers(path: str) -> bool:
    """Whether a process listens on a Unix socket; gRPC would take the socket of one that does."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
