"""The local link by hand: packets as a test writes them, and what comes back. Waits in threads, at most a minute."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from google.rpc import status_pb2

from deltaline import link

TIMEOUT_S = 60.0


class Packet(NamedTuple):
    """What came: its envelope, its body, and descriptors, which are the test's to close."""

    envelope: link.Envelope
    body: bytes
    fds: tuple[int, ...] = ()

    @property
    def kind(self) -> int:
        return self.envelope.kind

    @property
    def status(self) -> status_pb2.Status:
        assert self.kind == link.STATUS, self
        return status_pb2.Status.FromString(self.body)

    @property
    def place(self) -> link.Place:
        return link.Place.read(self.body)


class RawLink:
    """A connected socket, behind the server's welcome."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._calls = 0

    async def send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Send a packet."""
        if fds:
            await asyncio.to_thread(socket.send_fds, self.socket, [packet], fds)
        else:
            await asyncio.to_thread(self.socket.send, packet)

    async def begin(
        self, method: str, body: bytes = b"", *, flags: int = link.LAST, timeout_s: float = 0.0, metadata: Any = None
    ) -> int:
        """Begin a call with its first message; return its number."""
        self._calls += 1
        head = link.pack(
            link.CALL,
            self._calls,
            flags=flags,
            amount=round(timeout_s * 1e6),
            method=method.encode(),
            metadata=link.pack_metadata(metadata),
        )
        await self.send(head + body)
        return self._calls

    async def receive(self) -> Packet | None:
        """The next packet; None at the end of the connection."""
        return await asyncio.to_thread(self._receive)

    async def call(self, method: str, body: bytes = b"", **options: Any) -> bytes:
        """Make a call with one message each way. Its status is an AssertionError."""
        await self.begin(method, body, **options)
        packet = await self.receive()
        assert packet is not None and packet.kind == link.MESSAGE, packet
        assert packet.envelope.flags == link.LAST
        return packet.body

    async def goodbye(self) -> str:
        """Why the server ends the connection, with all that came before dropped."""
        why = ""
        while (packet := await self.receive()) is not None:
            if packet.kind == link.GOODBYE:
                why = packet.body.decode()
        return why

    async def memory(self, size: int) -> tuple[link.Place, int]:
        """Ask for link memory; return its place and its file."""
        self._calls += 1
        await self.send(link.pack(link.MEMORY, self._calls) + link.Place(0, 0, size).packed())
        packet = await self.receive()
        assert packet is not None and packet.kind == link.MEMORY, packet
        (fd,) = packet.fds
        return packet.place, fd

    async def given_back(self) -> link.Place:
        """The place that comes back with the next packet."""
        packet = await self.receive()
        assert packet is not None and packet.kind == link.TAKEN and packet.envelope.flags == link.PLACED, packet
        return packet.place

    def _receive(self) -> Packet | None:
        for _ in range(2):  # an end with packets unread is told once, before what came ahead of it
            try:
                packet, ancillary, _, _ = self.socket.recvmsg(link.MAX_PACKET_BYTES, socket.CMSG_SPACE(64))
                break
            except (ConnectionResetError, BrokenPipeError):
                packet, ancillary = b"", []
        if not packet:
            return None
        fds = [fd for _, _, data in ancillary for fd in memoryview(data).cast("i")]
        envelope = link.read(memoryview(packet))
        return Packet(envelope, packet[envelope.body_at :], tuple(fds))

    def close(self) -> None:
        self.socket.close()


def connected_socket(path: str | os.PathLike[str]) -> socket.socket:
    """A socket of the link's kind, connected."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(TIMEOUT_S)
    try:
        made.connect(os.fspath(path))
    except OSError:
        made.close()
        raise
    return made


@asynccontextmanager
async def raw_link(path: str | os.PathLike[str]) -> AsyncIterator[RawLink]:
    """A connection that has been welcomed."""
    connection = RawLink(await asyncio.to_thread(connected_socket, path))
    try:
        packet = await connection.receive()
        assert packet is not None and packet.kind == link.WELCOME, packet
        yield connection
    finally:
        connection.close()
