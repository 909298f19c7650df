"""The socket of a connection: packets in and out."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from deltaline import link
from deltaline.wire import Buffer
from deltaline_server.front.interceptor import bug
from deltaline_server.front.link.held import Share

# As plain numbers: an enum's operators are eight calls in Python, for each packet.
_CTRUNC, _TRUNC = int(socket.MSG_CTRUNC), int(socket.MSG_TRUNC)


class PacketSocket:
    """A client's socket on the event loop. A client that does not read is not read: while packets wait for room in the
    socket it has to read first. They count to its share of what is held."""

    def __init__(
        self,
        connected: socket.socket,
        buffer: memoryview,
        share: Share,
        take: Callable[[memoryview], None],
        end: Callable[[str], None],
    ) -> None:
        """buffer: room for a packet, while it is taken. take: gets each packet; may raise LinkError. end: told why
        nothing more can be had from the client, "" when it is gone; it has to `close`."""
        self._socket, self._buffer, self._share = connected, buffer, share
        self._take, self._end = take, end
        self._loop = asyncio.get_running_loop()
        # Packets that the socket did not take, each with the file that goes with it.
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._drained = asyncio.Event()
        self._is_closed = False

    def start(self) -> None:
        """Take what the client sends."""
        self._loop.add_reader(self._socket, self._read)

    def write(self, *pieces: Buffer, fd: int | None = None) -> None:
        """Send a packet, behind those that wait. fd: a file to go with it, the caller's, open until `close`."""
        if self._is_closed:
            return
        if not self._outbox:
            try:
                return self._send(pieces, fd)
            except BlockingIOError:
                self._loop.remove_reader(self._socket)
                self._loop.add_writer(self._socket, self._flush)
                self._drained.clear()
            except OSError:
                return self._end("")
        packet = b"".join(pieces)
        self._outbox.append((packet, fd))
        self._share.take(len(packet))

    async def drain(self) -> None:
        """Return once no packet waits."""
        if self._outbox:
            await self._drained.wait()

    def close(self, last: bytes = b"") -> None:
        """Close it, with a last packet if there is room. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if last and not self._outbox:
            with suppress(OSError):  # the client may have gone, and is not waited for
                self._send((last,))
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._outbox.clear()

    def _read(self) -> None:
        """Take one packet: the loop comes back for the next, and to other connections before."""
        try:
            # No room for descriptors: the kernel drops those that come, and says so.
            size, _, flags, _ = self._socket.recvmsg_into([self._buffer])
        except BlockingIOError:
            return
        except OSError:
            return self._end("")
        try:
            if flags & _CTRUNC:
                raise link.LinkError("expected no descriptors, which go from the server to the client only")
            if size == 0:
                return self._end("")
            if flags & _TRUNC:
                raise link.LinkError(f"expected packets of at most {link.MAX_PACKET_BYTES} bytes")
            self._take(self._buffer[:size])
        except link.LinkError as error:
            self._end(str(error))
        except Exception as error:
            self._end(bug(error).message)

    def _send(self, pieces: Sequence[Buffer], fd: int | None = None) -> None:
        """Raises OSError."""
        if fd is None:
            self._socket.sendmsg(pieces)
        else:
            socket.send_fds(self._socket, pieces, [fd])

    def _flush(self) -> None:
        """The socket has room."""
        try:
            while self._outbox:
                packet, fd = self._outbox[0]
                self._send((packet,), fd)
                self._outbox.popleft()
                self._share.give_back(len(packet))
        except BlockingIOError:
            return
        except OSError:
            return self._end("")
        self._loop.remove_writer(self._socket)
        self._loop.add_reader(self._socket, self._read)
        self._drained.set()
