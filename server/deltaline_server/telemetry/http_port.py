"""The HTTP port: /metrics for Prometheus, /healthz and /readyz for probes that speak no gRPC."""

from __future__ import annotations

import asyncio
import errno
import gzip
import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from prometheus_client.exposition import gzip_accepted

from deltaline_server.telemetry.metrics_pages import MetricsPages

_log = logging.getLogger(__name__)

# How long a client may let a connection stand still, and how long one lasts whatever it does.
CLIENT_S = 10.0
LIFE_S = 20.0
# Connections at once, a thread each.
MAX_CONNECTIONS = 64
# How often the thread that accepts connections looks whether it is to end.
POLL_S = 0.1
# An event loop that has not answered for so long is stuck.
LOOP_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_OPEN_METRICS = "application/openmetrics-text"
# What gRPC makes of the name localhost, whatever the host's tables say of it.
_LOOPBACK = ("127.0.0.1", "::1")
_WILDCARDS = ("0.0.0.0", "::")
# Of an address that this host does not have, such as ::1 where IPv6 is off.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class HttpPort:
    """Serves the pages until `close`, on every address that gRPC listens on for the same host.

    port: as bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: MetricsPages,
        context: Callable[[], ssl.SSLContext] | None = None,
        *,
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
    ) -> None:
        """Listen on the port, 0 for any. To be called on the event loop, which the probes are asked on: one that is
        stuck is neither live nor ready. context: of TLS for the next connection, None without; where it asks for a
        client's certificate, metrics need one. Raises: OSError.
        """
        self.port, self.context = port, context
        self.metrics = metrics
        self.probes = {"/healthz": ("live", is_live), "/readyz": ("ready", is_ready)}
        self.connections = Connections()
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Listener] = []
        try:
            self._listen(host)
        except OSError:
            self._close_sockets()
            raise
        for listener in self._listeners:
            threading.Thread(target=listener.serve_forever, args=(POLL_S,), name="http", daemon=True).start()

    def _listen(self, host: str) -> None:
        """Bind every address of the host that is this machine's, all with one port."""
        absent: OSError | None = None
        for family, address in _addresses(host):
            try:
                self._listeners.append(Listener(self, family, (address, self.port)))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                absent = error
            else:
                self.port = int(self._listeners[-1].server_address[1])
        if absent is not None and not self._listeners:
            raise absent

    def close(self) -> None:
        """Stop serving. Blocks for a few POLL_S at most. Idempotent."""
        for listener in self._listeners:
            listener.shutdown()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for listener in self._listeners:
            listener.server_close()

    def ask(self, probe: Callable[[], bool]) -> bool:
        """What a probe says on the event loop, from any other thread."""

        async def answer() -> bool:
            return probe()

        asked = asyncio.run_coroutine_threadsafe(answer(), self._loop)
        try:
            return asked.result(LOOP_S)
        except (TimeoutError, CancelledError):
            asked.cancel()
            return False


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Where gRPC listens for a host: both families of localhost and of the wildcards. Raises OSError."""
    if host in _WILDCARDS and socket.has_dualstack_ipv6():
        return [(socket.AF_INET6, "::")]
    found = [
        (family, str(address[0]))
        for name in (_LOOPBACK if host == "localhost" else (host,))
        for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    ]
    return list(dict.fromkeys(found))


class Connections:
    """The connections of a port, oldest first: MAX_CONNECTIONS at most, none for longer than LIFE_S.

    One more takes the place of the oldest that has not sent its whole request: a scrape sends it at once, so that it
    gets through however many others send theirs a byte at a time. Threads share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # When each began.
        self._asking: dict[socket.socket, float] = {}
        self._asked: dict[socket.socket, float] = {}

    @property
    def num_asked(self) -> int:
        """How many are being answered."""
        return len(self._asked)

    def begin(self, connection: socket.socket) -> bool:
        """Take in a connection; False where there is no room for it."""
        with self._lock:
            if len(self._asking) + len(self._asked) >= MAX_CONNECTIONS:
                if not self._asking:
                    return False
                self._cut_oldest(self._asking)
            self._asking[connection] = time.monotonic()
            return True

    def asked(self, connection: socket.socket) -> None:
        """It has sent its whole request."""
        with self._lock:
            if connection in self._asking:  # else it is cut
                self._asked[connection] = self._asking.pop(connection)

    def end(self, connection: socket.socket) -> None:
        """It is over. Idempotent."""
        with self._lock:
            self._asking.pop(connection, None)
            self._asked.pop(connection, None)

    def cut_overdue(self) -> None:
        """End those that have lasted too long."""
        end_s = time.monotonic() - LIFE_S
        with self._lock:
            for begun in (self._asking, self._asked):
                while begun and next(iter(begun.values())) < end_s:
                    self._cut_oldest(begun)

    def _cut_oldest(self, begun: dict[socket.socket, float]) -> None:
        """Its thread, which reads or writes, sees the end and closes it."""
        connection = next(iter(begun))
        del begun[connection]
        with suppress(OSError):  # it is closed
            connection.shutdown(socket.SHUT_RDWR)


class Listener(ThreadingTCPServer):
    """One address of a port. Each connection has a thread: a client that reads nothing holds up itself alone."""

    allow_reuse_address = daemon_threads = True
    # With fewer that wait to be taken a scrape among many would wait for seconds.
    request_queue_size = 1024

    def __init__(self, port: HttpPort, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        """Listen. Raises OSError."""
        self.pages = port
        self.address_family = family
        super().__init__(address, Request, bind_and_activate=False)
        try:
            if family == socket.AF_INET6:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] not in _WILDCARDS)
            self.server_bind()
            self.server_activate()
        except OSError:
            self.server_close()
            raise

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection. Its thread does what TLS takes, which waits for the client. Raises OSError."""
        connection, address = super().get_request()
        context = self.pages.context
        if context is not None:
            connection = context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def service_actions(self) -> None:
        """What is done every POLL_S."""
        self.pages.connections.cut_overdue()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, where there is room."""
        if self.pages.connections.begin(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and make room for another."""
        super().shutdown_request(request)
        self.pages.connections.end(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what went wrong with a request, unless it is the client that is gone or stands still."""
        if not isinstance(sys.exc_info()[1], OSError):
            _log.exception("a request failed")


class Request(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Listener
    timeout = CLIENT_S
    # Of a request line that names none: an answer has a status, too.
    default_request_version = "HTTP/1.0"

    def parse_request(self) -> bool:
        """Read the headers too; False where that is no request, which is answered then."""
        is_request = super().parse_request()
        self.server.pages.connections.asked(self.connection)
        return is_request

    def do_GET(self) -> None:
        path, pages = self.path.partition("?")[0], self.server.pages
        if path == "/metrics" and self._lacks_certificate():
            self._answer(403, b"expected a client certificate\n")
        elif path == "/metrics":
            # Not what the header has beside it: the encoder reads versions that are none, and answers with them.
            types = [part.partition(";")[0].strip() for part in self._header("Accept").split(",")]
            try:
                page = pages.metrics.page(_OPEN_METRICS if _OPEN_METRICS in types else "")
            except Exception:
                _log.exception("the metrics could not be read")
                self._answer(500, b"the metrics could not be read\n")
            else:
                self._answer(200, page.plain, page.content_type, page.zipped)
        elif path in pages.probes:
            word, probe = pages.probes[path]
            is_so = pages.ask(probe)
            self._answer(200 if is_so else 503, b"%s%s\n" % (b"" if is_so else b"not ", word.encode()))
        else:
            self._answer(404, b"expected /metrics, /healthz or /readyz\n")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(405, b"expected GET or HEAD\n")

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = do_POST

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request of ours, without a word of it; an unknown method is one that is not allowed."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self.do_POST()
        else:
            is_ours = 400 <= code < 500
            self._answer(
                code if is_ours else HTTPStatus.BAD_REQUEST, b"expected a request of HTTP/1 within its limits\n"
            )

    def log_message(self, format: str, *args: Any) -> None:
        """Probes and scrapes come every few seconds: none has a line in the log."""

    def _answer(self, status: int, body: bytes, content_type: str = _TEXT, zipped: bytes | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
        if gzip_accepted(self._header("Accept-Encoding")):
            self.send_header("Content-Encoding", "gzip")
            body = gzip.compress(body) if zipped is None else zipped
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _lacks_certificate(self) -> bool:
        """Whether the client has not shown the certificate that it was asked for."""
        connection = self.connection
        return (
            isinstance(connection, ssl.SSLSocket)
            and connection.context.verify_mode is not ssl.CERT_NONE
            and not connection.getpeercert()
        )

    def _header(self, name: str) -> str:
        """A header's value, "" where there is none, as of a request that ended before its headers."""
        headers = getattr(self, "headers", None)
        return "" if headers is None else str(headers.get(name, ""))
