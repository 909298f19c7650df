"""The local link: the envelope of what a client and a server of one host send each other over a UNIX socket.

The socket is of the kind SOCK_SEQPACKET: the kernel keeps packets whole. A packet is an envelope (ENVELOPE, then the
method, the metadata and the asserted client, as long as it says) and a body. Calls and their messages are those of
gRPC: a message of a call is the same bytes. One that does not fit a packet lies whole in link memory, which the server
has made and the client hands out: the packet then has its Place for a body.

    from the client   CALL, MESSAGE, CANCEL, ROOM (a Place for a reply), MEMORY (asks; a Place without region)
    a front end also  TAKEN
    from the server   WELCOME, MESSAGE, STATUS, ROOM (asks), MEMORY (a Place, and the file), TAKEN, GOODBYE
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

VERSION = 1
SCHEME = "link:"
"""How the address of a local link begins; the path of its socket follows."""

MAX_PACKET_BYTES = 128 << 10
"""Most bytes of a packet. A UNIX socket with the kernel's defaults refuses some 200 KiB."""

STREAM_MESSAGES = 64
"""Most messages of a call that the server has not taken, the first one included: TAKEN gives their number back."""

UNREAD_BYTES = 1 << 20
"""Bytes of replies from which on a stream of a front end's waits until its client has read some: TAKEN says so."""

MAX_CALLS = 64
"""Most calls of a connection at a time."""

REPLY_BYTES = 4 << 20
"""Most bytes of a reply, of a server whose requests have fewer."""

# Kinds of packets.
CALL = 1
"""Begins a call: method, metadata and timeout, and its first message unless EMPTY."""
MESSAGE = 2
"""One more message of a call. LAST from the server says that the call ended well."""
CANCEL = 3
"""The client gives the call up; its STATUS still comes, or its LAST message."""
ROOM = 4
"""From the server: a reply waits for memory; its Place has the size alone. From the client: the Place for it."""
MEMORY = 5
"""From the client: asks for link memory of a size. From the server: it, and its file."""
WELCOME = 6
"""The server's first packet: a Welcome."""
STATUS = 7
"""The call ended: a google.rpc.Status, empty where it ended well. It also refuses MEMORY. The amount says for how many
microseconds a front end keeps it back."""
TAKEN = 8
"""The server has taken so many more messages of a call. PLACED: it no longer needs a Place. From a front end:
its client has read so many more bytes of replies.

Each Place that the client names comes back once, for a call that is over too: so, or with the reply that lies in it.
"""
GOODBYE = 9
"""The server ends the connection: why, in UTF-8."""

# Flags.
LAST = 1
"""The sender has no more messages for the call."""
PLACED = 2
"""The body is a Place, where the message lies."""
EMPTY = 4
"""The packet has no message."""

ENVELOPE = struct.Struct("<BBHHHQQ")
"""kind, flags, bytes of method, of metadata, of the asserted client, number of the call, amount.

The client numbers its calls from 1, each higher than those before on the connection. The amount is a CALL's timeout in
microseconds, 0 for none, the number of messages TAKEN, and what a STATUS says.
"""

_PLACE = struct.Struct("<QQQ")
_WELCOME = struct.Struct("<IIQQ")

Metadata: TypeAlias = tuple[tuple[str, str], ...]


def memory_bytes(message_bytes: int) -> int:
    """How much link memory a client needs where messages have so many bytes: half of it for replies, a multiple of 64,
    where the largest has room whatever messages wait to be taken."""
    return -(-max(message_bytes, REPLY_BYTES) // 64) * 128


class LinkError(ValueError):
    """A packet is not one of the link's. The message says in words what was expected."""


class Place(NamedTuple):
    """Where in link memory something lies: the region's number, offset and size in bytes."""

    region: int
    offset: int
    size: int

    def packed(self) -> bytes:
        """As the body of a packet."""
        return _PLACE.pack(*self)

    @classmethod
    def read(cls, body: bytes | memoryview) -> Place:
        """Read a body. Raises LinkError."""
        if len(body) != _PLACE.size:
            raise LinkError(f"expected a place of {_PLACE.size} bytes, got {len(body)}")
        return cls(*_PLACE.unpack(body))


class Welcome(NamedTuple):
    """What the server tells first. message_bytes: most bytes of a message of a call."""

    version: int
    server_epoch: int
    message_bytes: int

    def packed(self) -> bytes:
        """As the body of a packet."""
        return _WELCOME.pack(self.version, 0, self.server_epoch, self.message_bytes)

    @classmethod
    def read(cls, body: bytes | memoryview) -> Welcome:
        """Read a body; a later version's may have more behind. Raises LinkError."""
        if len(body) < _WELCOME.size:
            raise LinkError(f"expected a welcome of {_WELCOME.size} bytes, got {len(body)}")
        version, _, server_epoch, message_bytes = _WELCOME.unpack_from(body)
        return cls(version, server_epoch, message_bytes)


class Envelope(NamedTuple):
    """What stands in front of a body, which begins at `body_at`.

    client: who the call is from, where a front end says so; only the process that started it may believe that.
    """

    kind: int
    flags: int
    call: int
    amount: int
    method: bytes
    metadata: bytes
    client: bytes
    body_at: int


def pack(
    kind: int,
    call: int = 0,
    *,
    flags: int = 0,
    amount: int = 0,
    method: bytes = b"",
    metadata: bytes = b"",
    client: bytes = b"",
) -> bytes:
    """Return an envelope; the body goes behind it."""
    head = ENVELOPE.pack(kind, flags, len(method), len(metadata), len(client), call, amount)
    return b"".join((head, method, metadata, client)) if method else head


def read(packet: memoryview) -> Envelope:
    """Read the envelope of a packet. Raises LinkError for bytes that are none."""
    if len(packet) < ENVELOPE.size:
        raise LinkError(f"expected an envelope of {ENVELOPE.size} bytes, got {len(packet)}")
    kind, flags, method_bytes, metadata_bytes, client_bytes, call, amount = ENVELOPE.unpack_from(packet)
    if not method_bytes + metadata_bytes + client_bytes:
        return Envelope(kind, flags, call, amount, b"", b"", b"", ENVELOPE.size)
    metadata_at = ENVELOPE.size + method_bytes
    client_at = metadata_at + metadata_bytes
    body_at = client_at + client_bytes
    if body_at > len(packet):
        raise LinkError(f"expected {body_at} bytes, as the envelope says, got {len(packet)}")
    method, metadata = bytes(packet[ENVELOPE.size : metadata_at]), bytes(packet[metadata_at:client_at])
    return Envelope(kind, flags, call, amount, method, metadata, bytes(packet[client_at:body_at]), body_at)


def pack_metadata(metadata: Iterable[tuple[str, str]] | None) -> bytes:
    """Write a call's metadata, names and values without zero bytes."""
    return "\0".join([text for pair in metadata or () for text in pair]).encode()


def read_metadata(packed: bytes) -> Metadata:
    """Read a call's metadata. Raises LinkError."""
    if not packed:
        return ()
    try:
        texts = packed.decode().split("\0")
    except UnicodeDecodeError as error:
        raise LinkError("expected metadata in UTF-8") from error
    if len(texts) % 2:
        raise LinkError(f"expected a value for each name of the metadata, got {len(texts)} texts")
    return tuple(zip(texts[::2], texts[1::2], strict=True))
