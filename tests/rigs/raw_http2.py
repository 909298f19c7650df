"""gRPC by hand, as no client does it: frames as a test writes them, on a connection that reads as little as it says."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
CANCEL = 8
_INITIAL_WINDOW_SIZE = 4
LARGEST = 2**31 - 1


class RawHttp2:
    """A connection that has said hello. What comes is read when the test says so, or when there is no room to send.

    headers, ended: streams whose headers came, and those that the server has ended. received: bytes of data by stream.
    """

    def __init__(self, connected: socket.socket, window: int) -> None:
        """window: bytes that the server may send on a stream; with 0 it keeps every reply."""
        self.socket = connected
        self._stream, self._came = -1, b""
        self._first_room = 65_535
        self._room = {0: self._first_room}
        self.headers, self.ended, self.received = set[int](), set[int](), Counter[int]()
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))

    def begin(self, method: str, **more: bytes) -> int:
        """Begin a call, with more headers perhaps; return its stream."""
        self._stream += 2
        self._room[self._stream] = self._first_room
        self.socket.sendall(frame(HEADERS, END_HEADERS, self._stream, _headers(method, more)))
        return self._stream

    def send(self, stream: int, body: bytes, *, ends: bool = True) -> None:
        """Send bytes of a call's messages, with their prefix (`message`), as the server has room for them."""
        at = 0
        while at < len(body) or (ends and not body):
            room = min(16_384, self._room[0], self._room[stream])
            if room <= 0:
                if stream in self.ended or not self.read():
                    return  # the server does not want them
                continue
            piece, at = body[at : at + room], at + room
            self._room[0] -= len(piece)
            self._room[stream] -= len(piece)
            is_last = ends and at >= len(body)
            self.socket.sendall(frame(DATA, END_STREAM * is_last, stream, piece))
            if is_last:
                return

    def call(self, method: str, body: bytes, **more: bytes) -> int:
        """A whole call with one message, and more headers perhaps; return its stream."""
        stream = self.begin(method, **more)
        self.send(stream, message(body))
        return stream

    def cancel(self, stream: int) -> None:
        """Take a call back."""
        self.socket.sendall(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))

    def read(self) -> bool:
        """Read a frame; False when the server has ended the connection."""
        head = self._take(9)
        if len(head) < 9:
            return False
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        content = self._take(int.from_bytes(head[:3]))
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(content), 6):
                name, value = struct.unpack_from(">HI", content, at)
                if name == _INITIAL_WINDOW_SIZE:
                    self._room = {
                        one: room + (value - self._first_room) * (one > 0) for one, room in self._room.items()
                    }
                    self._first_room = value
            self.socket.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, content))
        elif kind == WINDOW_UPDATE:
            self._room[stream] = self._room.get(stream, 0) + int.from_bytes(content)
        elif kind == HEADERS:
            self.headers.add(stream)
        elif kind == DATA:
            self.received[stream] += len(content)
        if kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.ended.add(stream)
        return bool(kind != GOAWAY)

    def read_until(self, condition: Callable[[], bool]) -> None:
        """Read until a condition holds, or the server has ended the connection."""
        while not condition() and self.read():
            pass

    def _take(self, count: int) -> bytes:
        while len(self._came) < count:
            try:
                came = self.socket.recv(1 << 20)
            except ConnectionError:
                came = b""
            if not came:
                return b""
            self._came += came
        taken, self._came = self._came[:count], self._came[count:]
        return taken


@contextmanager
def raw_http2(address: str, window: int = LARGEST) -> Iterator[RawHttp2]:
    """A connection to HOST:PORT."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connected:
        yield RawHttp2(connected, window)


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + content


def message(body: bytes) -> bytes:
    """A message of gRPC, not compressed."""
    return b"\0" + struct.pack(">I", len(body)) + body


def _headers(method: str, more: Mapping[str, bytes]) -> bytes:
    """The headers of a call, each spelled out (RFC 7541, 6.2.2): no table, no Huffman code."""
    fields = {
        ":method": b"POST",
        ":scheme": b"http",
        ":path": method.encode(),
        ":authority": b"localhost",
        "te": b"trailers",
        "content-type": b"application/grpc",
        **more,
    }
    pieces = []
    for name, value in fields.items():
        assert len(name) < 127 and len(value) < 127, "one byte of length"
        pieces.append(b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value)
    return b"".join(pieces)
