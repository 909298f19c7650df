"""The HTTP port answers its pages and nothing else, and no client holds up another."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Gauge
from rigs.until import until

from deltaline_server.telemetry import http_port
from deltaline_server.telemetry.http_port import HttpPort
from deltaline_server.telemetry.metrics_pages import PAGES_PER_S, MetricsPages

PATHS = ("/metrics", "/healthz", "/readyz", "/", "/nothing", "/metrics/x")
# More than the buffers of two sockets hold.
LARGE_TEXT = "x" * (16 << 20)


class Port:
    """A port over one gauge, whose probes say what the test says."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.gauge = Gauge("deltaline_lines_used", "State lines in use.", registry=self.registry)
        self.is_live = self.is_ready = True
        self.now_s = 0.0
        pages = MetricsPages(self.registry, lambda: self.now_s)
        self.http = HttpPort("127.0.0.1", 0, pages, is_live=lambda: self.is_live, is_ready=lambda: self.is_ready)

    def request(self, path: str, method: str = "GET", **headers: str) -> SimpleNamespace:
        """The answer to a request, from the calling thread."""
        connection = HTTPConnection("127.0.0.1", self.http.port, timeout=30)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return SimpleNamespace(status=answer.status, headers=dict(answer.getheaders()), body=answer.read())
        finally:
            connection.close()

    async def ask(self, path: str, method: str = "GET", **headers: str) -> SimpleNamespace:
        return await asyncio.to_thread(self.request, path, method, **headers)


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    port = Port()
    yield port
    await asyncio.to_thread(port.http.close)


async def test_a_path_that_is_no_page_is_not_found(port: Port) -> None:
    assert [(await port.ask(path)).status for path in PATHS] == [200, 200, 200, 404, 404, 404]


async def test_head_is_get_without_the_body(port: Port) -> None:
    for path in PATHS:
        get, head = await port.ask(path), await port.ask(path, "HEAD")
        varying = {"Date": ""}
        assert (head.status, head.headers | varying, head.body) == (get.status, get.headers | varying, b"")
        assert int(get.headers["Content-Length"]) == len(get.body) > 0


async def test_other_methods_are_refused_with_those_that_are_allowed(port: Port) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        answer = await port.ask("/metrics", method)
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


async def test_probes_say_what_is_so(port: Port) -> None:
    async def said() -> list[tuple[int, bytes]]:
        answers = [await port.ask("/healthz"), await port.ask("/readyz?verbose")]
        return [(answer.status, answer.body) for answer in answers]

    assert await said() == [(200, b"live\n"), (200, b"ready\n")]
    port.is_ready = False
    assert await said() == [(200, b"live\n"), (503, b"not ready\n")]
    port.is_live = False
    assert await said() == [(503, b"not live\n"), (503, b"not ready\n")]


async def test_an_event_loop_that_is_stuck_is_not_live(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "LOOP_S", 0.01)
    with ThreadPoolExecutor(1) as thread:
        # Waits on the event loop's own thread, which answers nothing in the meantime.
        assert thread.submit(port.request, "/healthz").result().status == 503


async def test_the_metrics_come_as_the_scraper_asks(port: Port) -> None:
    port.gauge.set(3)
    plain, zipped = await port.ask("/metrics"), await port.ask("/metrics", Accept_Encoding="gzip")
    assert b"\ndeltaline_lines_used 3.0\n" in plain.body
    assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert zipped.headers["Content-Encoding"] == "gzip" and gzip.decompress(zipped.body) == plain.body
    open_metrics = await port.ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert open_metrics.headers["Content-Type"].startswith("application/openmetrics-text")
    assert open_metrics.body.endswith(b"# EOF\n")


async def test_of_many_scrapes_at_once_few_read_the_registry(port: Port) -> None:
    num_read = itertools.count(1)
    port.gauge.set_function(lambda: next(num_read))
    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(port.request, "/metrics") for _ in range(64)]
        pages = Counter([(await asyncio.wrap_future(one)).body for one in asked])
    assert sorted(pages.values()) == [1] * (PAGES_PER_S - 1) + [64 - PAGES_PER_S + 1]
    assert next(num_read) == PAGES_PER_S + 1


async def test_clients_that_send_or_read_nothing_hold_up_nobody(port: Port) -> None:
    Gauge("deltaline_large", LARGE_TEXT, registry=port.registry)
    address = ("127.0.0.1", port.http.port)
    with socket.create_connection(address), socket.create_connection(address) as reads_nothing:
        reads_nothing.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert len((await port.ask("/metrics")).body) > len(LARGE_TEXT)
        assert (await port.ask("/healthz")).status == 200


async def test_a_page_that_fails_is_logged_and_the_next_one_is_answered(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    port.gauge.set_function(lambda: 1 / 0)
    assert (await port.ask("/metrics")).status == 500
    assert "the metrics could not be read" in caplog.text
    assert (await port.ask("/healthz")).status == 200


async def test_a_client_that_stands_still_is_cut_off(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port.Request, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", port.http.port), timeout=60) as client:
        client.sendall(b"GET /met")
        assert await asyncio.to_thread(client.recv, 1) == b""


async def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "LIFE_S", 0.1)
    with socket.create_connection(("127.0.0.1", port.http.port)) as client:
        async with asyncio.timeout(60):
            with pytest.raises(ConnectionError):
                while True:
                    client.sendall(b"x")
                    await asyncio.sleep(0.02)


async def test_connections_are_bounded_and_a_scrape_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "MAX_CONNECTIONS", 2)
    port = Port()
    address = ("127.0.0.1", port.http.port)
    with socket.create_connection(address, timeout=60) as first, socket.create_connection(address) as second:
        second.sendall(b"GET /met")
        assert (await port.ask("/metrics")).status == 200
        assert await asyncio.to_thread(first.recv, 1) == b""  # the oldest made way
    await asyncio.to_thread(port.http.close)


async def test_those_that_have_asked_make_way_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "MAX_CONNECTIONS", 1)
    port, may_answer = Port(), threading.Event()
    port.gauge.set_function(lambda: float(may_answer.wait(60)))
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(port.request, "/metrics")
        await until(lambda: port.http.connections.num_asked)
        with socket.create_connection(("127.0.0.1", port.http.port), timeout=60) as one_more:
            assert await asyncio.to_thread(one_more.recv, 1) == b""
        may_answer.set()
        assert (await asyncio.to_thread(asking.result)).status == 200
    await until(lambda: not port.http.connections.num_asked)
    assert (await port.ask("/healthz")).status == 200
    await asyncio.to_thread(port.http.close)


@pytest.mark.parametrize(
    ("request_line", "headers", "expected"),
    [
        ("GET /metrics HTTP/1.1", "Accept: application/openmetrics-text; version=MARK", 200),
        ("GET /metrics HTTP/1.1", "Accept: application/openmetrics-text; version=98765.0", 200),
        ("GET /metrics HTTP/1.1", "Accept: text/plain; version=1.MARK; escaping=MARK", 200),
        ("GET /metrics HTTP/1.1", "Accept: \xff,;;=,MARK\r\nAccept-Encoding: ;MARK,\xff", 200),
        ("GET /metrics HTTP/1.1", "\r\n".join(f"X-{i}: MARK" for i in range(200)), 431),
        ("GET /metrics HTTP/2.0", "Accept: MARK", 400),
        ("GET /metrics MARK", "Accept: MARK", 400),
        ("MARK /metrics HTTP/1.1", "Accept: MARK", 405),
    ],
)
async def test_whatever_is_asked_is_answered_and_not_repeated(
    port: Port, request_line: str, headers: str, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    def answer() -> bytes:
        with socket.create_connection(("127.0.0.1", port.http.port), timeout=60) as client:
            client.sendall(f"{request_line}\r\n{headers}\r\n\r\n".encode("latin-1"))
            return client.makefile("rb").read()

    told = await asyncio.to_thread(answer)
    assert told.startswith(b"HTTP/1.0 %d " % expected)
    assert (b"deltaline_lines_used" in told) == (expected == 200)
    assert b"MARK" not in told and b"98765" not in told and caplog.text == ""
