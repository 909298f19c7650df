"""The HTTP port: /metrics for Prometheus, /healthz and /readyz for probes that speak no gRPC."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

_log = logging.getLogger(__name__)

# How long a client may let a connection stand still.
CLIENT_S = 10.0
# Connections at once, a thread each; one more is closed unanswered.
MAX_CONNECTIONS = 64
# How often the thread that accepts connections looks whether it is to end.
POLL_S = 0.1
# An event loop that has not answered for so long is stuck.
LOOP_S = 5.0
_TEXT = "text/plain; charset=utf-8"


class HttpPort(ThreadingTCPServer):
    """Serves the pages until `close`. Each connection has a thread: a client that reads nothing holds up itself alone.

    port: as bound.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
    ) -> None:
        """Listen on the port, 0 for any. To be called on the event loop, which the probes are asked on: one that is
        stuck is neither live nor ready. Raises: OSError.
        """
        self.registry = registry
        self.probes = {"/healthz": ("live", is_live), "/readyz": ("ready", is_ready)}
        self._loop = asyncio.get_running_loop()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), Request)
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(POLL_S,), name="http", daemon=True).start()

    def close(self) -> None:
        """Stop serving. Blocks for POLL_S at most. Idempotent."""
        self.shutdown()
        self.server_close()

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

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless there are as many as may be."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what went wrong with a request, unless it is the client that is gone or stands still."""
        if not isinstance(sys.exc_info()[1], OSError):
            _log.exception("a request failed")


class Request(BaseHTTPRequestHandler):
    """Answers one request."""

    server: HttpPort
    timeout = CLIENT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            try:
                page = encode(self.server.registry)
            except Exception:
                _log.exception("the metrics could not be read")
                self._answer(500, b"the metrics could not be read\n")
            else:
                self._answer(200, page, content_type)
        elif path in self.server.probes:
            word, probe = self.server.probes[path]
            is_so = self.server.ask(probe)
            self._answer(200 if is_so else 503, b"%s%s\n" % (b"" if is_so else b"not ", word.encode()))
        else:
            self._answer(404, b"expected /metrics, /healthz or /readyz\n")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(405, b"expected GET or HEAD\n")

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Probes and scrapes come every few seconds: none has a line in the log."""

    def _answer(self, status: int, body: bytes, content_type: str = _TEXT) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
        if gzip_accepted(self.headers.get("Accept-Encoding", "")):
            self.send_header("Content-Encoding", "gzip")
            body = gzip.compress(body)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
