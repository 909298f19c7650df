"""A client of gRPC that does not read what it is sent, as one that was stopped: HTTP/2 by hand."""

from __future__ import annotations

import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_ACK = _END_STREAM = 1
_END_HEADERS = 4


class UnreadingClient:
    """A connection; `call` begins calls with one small message each."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._stream = address, 1
        self._socket = socket.create_connection((host, int(port)), timeout=60.0)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        assert self._socket.recv(9)[3] == _SETTINGS
        self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))

    def call(self, method: str, message: bytes) -> None:
        """Begin a call. message: at most 16 KiB."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": self._address,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        packed = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        body = b"\0" + struct.pack(">I", len(message)) + message
        head = _frame(_HEADERS, _END_HEADERS, self._stream, packed)
        self._socket.sendall(head + _frame(_DATA, _END_STREAM, self._stream, body))
        self._stream += 2

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """A text of a header, not compressed."""
    return bytes((len(text),)) + text.encode()
