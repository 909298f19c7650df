"""The socket of a client's connection of the link, on an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from google.rpc import code_pb2

from deltaline import link
from deltaline.conversation import Conversation
from deltaline.wire import Buffer

E = TypeVar("E")

FD_SPACE = 64
"""Room for the descriptors of a packet: it has one at most."""


def received_files(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a packet."""
    is_files = socket.SOL_SOCKET, getattr(socket, "SCM_RIGHTS", None)
    return [fd for level, kind, data in ancillary if (level, kind) == is_files for fd in memoryview(data).cast("i")]


class LinkSocket(Generic[E]):
    """Carries a conversation. moved: set whenever packets have come or gone."""

    def __init__(self, connected: socket.socket, conversation: Conversation[E]) -> None:
        """connected: behind the welcome, and does not block."""
        self._socket, self.conversation = connected, conversation
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(link.MAX_PACKET_BYTES))
        self._is_full = False
        self.moved = asyncio.Event()
        self._loop.add_reader(connected, self._read)

    @property
    def is_over(self) -> bool:
        """Whether it carries nothing more."""
        return self.conversation.error is not None

    def flush(self) -> None:
        """Send what can go now; the rest goes by itself."""
        if self.is_over:
            return
        is_full = not self.conversation.flush(self._write)
        if is_full != self._is_full:
            self._is_full = is_full
            if is_full:
                self._loop.add_writer(self._socket, self._write_more)
            else:
                self._loop.remove_writer(self._socket)

    async def until_moved(self) -> None:
        """Wait until packets have come or gone, or the connection is over."""
        self.moved.clear()
        await self.moved.wait()

    def close(self, error: E) -> None:
        """End it: what waits gets the error. Idempotent."""
        self.conversation.fail(error)
        self._close()

    def _close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self.moved.set()

    def _read(self) -> None:
        """Take a packet."""
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into([self._buffer], FD_SPACE)
        except (BlockingIOError, ConnectionResetError):  # told once, ahead of the last packets
            return
        except OSError:
            size, ancillary = 0, []
        if size:
            self.conversation.received(self._buffer[:size], received_files(ancillary) if ancillary else ())
        else:
            self.conversation.end(code_pb2.UNAVAILABLE, "the local link broke")
        self.moved.set()
        if self.is_over:
            self._close()
        elif self.conversation.unsent or self.conversation.control:
            self.flush()

    def _write_more(self) -> None:
        self.flush()
        self.moved.set()

    def _write(self, pieces: Sequence[Buffer]) -> bool:
        try:
            self._socket.sendmsg(pieces)
        except BlockingIOError:
            return False
        except OSError:  # what the server said before is read first
            return True
        return True
