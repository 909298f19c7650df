"""Sockets of the link: how one begins, room for its packets, and a client's connection on an event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from google.rpc import code_pb2

from deltaline import link
from deltaline.conversation import Conversation
from deltaline.wire import Buffer

E = TypeVar("E")

WELCOME_TIMEOUT_S = 5.0

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
# Room for the descriptors of a packet: it has one at most.
_FD_SPACE = 64
_FILES = socket.SOL_SOCKET, getattr(socket, "SCM_RIGHTS", None)
# What the kernel keeps of a socket's buffer for itself.
_KERNEL_BYTES = 32


def make_room(connected: socket.socket) -> None:
    """Let a socket send the largest packet. Raises OSError where the system gives it less."""
    needed, option = link.MAX_PACKET_BYTES + _KERNEL_BYTES, (socket.SOL_SOCKET, socket.SO_SNDBUF)
    if connected.getsockopt(*option) >= needed:
        return
    connected.setsockopt(*option, needed)
    granted = connected.getsockopt(*option)
    if granted < needed:
        why = f"a socket may have {granted} bytes to send (net.core.wmem_max), packets of the link need {needed}"
        raise OSError(errno.EMSGSIZE, why)


def connect(path: str, uid: int | None = None, server_epoch: int | None = None) -> tuple[socket.socket, link.Welcome]:
    """Connect to the server that listens at a path, and wait for its welcome; blocks. Returns a socket that does not.

    uid, server_epoch: whose it has to be; None for any server's of the user that owns the socket's folder. Raises
    OSError, and ValueError for another's.
    """
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "this system has no local link") from error
    try:
        connected.settimeout(WELCOME_TIMEOUT_S)
        make_room(connected)
        connected.connect(path)
        _check_user(connected, path, uid)
        welcome = _welcome(connected.recv(link.MAX_PACKET_BYTES))
        if server_epoch is not None and welcome.server_epoch != server_epoch:
            raise ValueError("another server listens on this link")
    except BaseException:
        connected.close()
        raise
    connected.setblocking(False)
    return connected, welcome


def _check_user(connected: socket.socket, path: str, uid: int | None) -> None:
    """Raise ValueError unless the peer is the user that owns the folder, and so says what lies in it."""
    _, peer, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    owner = os.stat(Path(path).parent).st_uid
    if peer != owner or uid not in (None, peer):
        expected = owner if uid is None else uid
        raise ValueError(f"expected a server of the user {expected} on this link, got one of {peer}")


def _welcome(packet: bytes) -> link.Welcome:
    """Read the first packet. Raises ValueError."""
    envelope = link.read(memoryview(packet))
    body = packet[envelope.body_at :]
    if envelope.kind == link.GOODBYE:
        raise ValueError(f"the server turned this client away: {body.decode(errors='replace')}")
    if envelope.kind != link.WELCOME:
        raise link.LinkError(f"expected a welcome, got the kind {envelope.kind}")
    welcome = link.Welcome.read(body)
    if welcome.version != link.VERSION:
        raise ValueError(f"expected version {link.VERSION} of the link, got {welcome.version}")
    return welcome


def receive(connected: socket.socket, buffer: memoryview, conversation: Conversation[E]) -> bool:
    """Take a packet for a conversation, if there is one; False where the connection is over. buffer: room for one."""
    try:
        size, ancillary, _, _ = connected.recvmsg_into([buffer], _FD_SPACE)
    except (BlockingIOError, ConnectionResetError):  # told once, ahead of the last packets
        return True
    except OSError:
        return False
    if not size:
        return False
    fds: list[int] = []
    if ancillary:
        fds += [fd for level, kind, data in ancillary if (level, kind) == _FILES for fd in memoryview(data).cast("i")]
    conversation.received(buffer[:size], fds)
    return True


def send(connected: socket.socket, pieces: Sequence[Buffer]) -> bool:
    """Send a packet; False where the socket is full. What ends a connection shows where it is read."""
    try:
        connected.sendmsg(pieces)
    except BlockingIOError:
        return False
    except OSError:  # what the server said before is read first, and then the end
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)
    return True


class LinkSocket(Generic[E]):
    """Carries a conversation. moved: set whenever packets have come or gone. ended: set once none can any more."""

    def __init__(self, connected: socket.socket, conversation: Conversation[E]) -> None:
        """connected: behind the welcome, and does not block."""
        self._socket, self.conversation = connected, conversation
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(link.MAX_PACKET_BYTES))
        self._is_full = False
        self._send = partial(send, connected)
        self.moved, self.ended = asyncio.Event(), asyncio.Event()
        self._loop.add_reader(connected, self._read)

    @property
    def is_over(self) -> bool:
        """Whether it carries nothing more."""
        return self.conversation.error is not None

    def flush(self) -> None:
        """Send what can go now; the rest goes by itself."""
        if self.conversation.error is not None:
            return
        is_full = not self.conversation.flush(self._send)
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
        self.ended.set()

    def _read(self) -> None:
        """Take a packet."""
        if not receive(self._socket, self._buffer, self.conversation):
            self.conversation.end(code_pb2.UNAVAILABLE, "the local link broke")
        self.moved.set()
        if self.conversation.error is not None:
            self._close()
        elif self.conversation.unsent or self.conversation.control:
            self.flush()

    def _write_more(self) -> None:
        self.flush()
        self.moved.set()
