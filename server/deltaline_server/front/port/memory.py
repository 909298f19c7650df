"""How much memory the clients of a gRPC port may make its process take."""

from __future__ import annotations

from deltaline_server.front.grpc_port import MAX_METADATA_BYTES, MAX_PENDING
from deltaline_server.front.port.descriptors import MAX_CONNECTIONS
from deltaline_server.front.port.gate import (
    MAX_CALLS,
    MAX_PROBES,
    MAX_TURNED_AWAY,
    MAX_WATCHES,
    RECEIVED,
    UNREAD_BYTES,
)

# Of a connection without calls, of a call without messages, and of one that nobody has looked at: more than was
# measured (15, 27 and 12 KB, docs/log.md). A call's window is beside it: what is sent before it is read.
CONNECTION_BYTES = 32 << 10
CALL_BYTES = 48 << 10
PENDING_BYTES = (16 << 10) + MAX_METADATA_BYTES
WINDOW_BYTES = 64 << 10
# gRPC has a message as its own bytes and as Python's.
COPIES = 2


def most_bytes(message_bytes: int) -> int:
    """Of connections, calls, requests that are received and replies that are not read, at most; beside what steps take.

    message_bytes: most bytes of a request.
    """
    calls = (MAX_CALLS + MAX_PROBES + MAX_WATCHES + MAX_TURNED_AWAY) * (CALL_BYTES + WINDOW_BYTES)
    waiting = MAX_CONNECTIONS * CONNECTION_BYTES + MAX_PENDING * PENDING_BYTES
    return waiting + calls + COPIES * (RECEIVED * message_bytes + UNREAD_BYTES)


def most_half_sent_bytes(message_bytes: int) -> int:
    """Of messages of streams that their clients begin and do not end: a stream may stand still at any time."""
    return MAX_CALLS * message_bytes
