"""The life of a server with front ends as clients and probes see it: start, readiness, drain, traces."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from rigs.routers import free_port
from rigs.small_models import HIDDEN
from rigs.until import until

from deltaline_cli.health import SERVICE, ask
from deltaline_client import AsyncClient, Draining
from deltaline_server import app
from deltaline_server.app import Server, StartError
from deltaline_server.front.ends.processes import FrontEndError, FrontEnds
from deltaline_server.runtime import Runtime

PROBE_S = 5.0


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process imports, its front ends do."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


async def probed(server: Server) -> list[str]:
    """What the probes of liveness, which a start-up waits for, and of readiness are told."""
    return [await asyncio.to_thread(ask, server.address, service, PROBE_S) for service in ("", SERVICE)]


def connects(port: int) -> int:
    """What the system says to a client that connects."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port))


async def test_nobody_connects_while_the_model_loads(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, may_load = Runtime.build, threading.Event()

    def slow(*arguments: Any) -> Runtime:
        may_load.wait(60)
        return build(*arguments)

    monkeypatch.setattr(Runtime, "build", slow)
    server = make_server(front_ends=1)
    starting = asyncio.create_task(server.start())
    try:
        await until(lambda: server.port)
        assert connects(server.port) == errno.ECONNREFUSED
        assert all(answer.startswith("UNAVAILABLE") for answer in await probed(server))
    finally:
        may_load.set()
        await starting
    assert await probed(server) == ["SERVING", "SERVING"]
    await server.stop()
    assert connects(server.port) == errno.ECONNREFUSED


async def test_who_comes_before_all_front_ends_serve_is_served_and_drained(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, serves, may_go_on = FrontEnds.start, asyncio.Event(), asyncio.Event()

    async def slow(self: FrontEnds, *arguments: Any) -> None:
        await start(self, *arguments)
        serves.set()
        await may_go_on.wait()  # as for one that is slow to start

    monkeypatch.setattr(FrontEnds, "start", slow)
    server = make_server(front_ends=1)
    starting = asyncio.create_task(server.start())
    await serves.wait()
    assert await probed(server) == ["SERVING", "NOT_SERVING"]
    async with AsyncClient(server.address) as client:
        sequence = await client.open()
        assert server.has_started  # a signal drains it
        server.interrupt()
        await sequence.decode(np.ones(HIDDEN, np.float32))
        assert not starting.done()
        await sequence.close()
        await asyncio.wait_for(starting, 60)
    assert await asyncio.wait_for(server.wait(), 60) == 0
    await server.stop()


async def test_front_ends_that_do_not_start_leave_nothing_behind(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: FrontEnds, *arguments: Any) -> None:
        raise FrontEndError("a front end ended (1) before it served")

    with monkeypatch.context() as patch:
        patch.setattr(FrontEnds, "start", fails)
        server = make_server(front_ends=1, port=free_port())
        with pytest.raises(StartError, match=r"--front-ends: a front end ended \(1\)"):
            await server.start()
    async with make_server(front_ends=1, port=server.port) as again:  # the port is free
        assert await probed(again) == ["SERVING", "SERVING"]


async def test_a_drain_through_a_front_end_serves_what_is_open(make_server: Callable[..., Server]) -> None:
    async with make_server(front_ends=1) as server, grpc.aio.insecure_channel(server.address) as channel:
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")(
            health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
        )

        async def told() -> int:
            return int(health_pb2.HealthCheckResponse.FromString(await asyncio.wait_for(watch.read(), 60)).status)

        assert await told() == health_pb2.HealthCheckResponse.SERVING
        async with AsyncClient(server.address) as client:
            sequence = await client.open()
            assert await client.drain(60.0) == 1
            assert await told() == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(Draining):
                await client.open()
            await sequence.decode(np.ones(HIDDEN, np.float32))
            await sequence.close()
        assert await asyncio.wait_for(server.wait(), 60) == 0


async def test_a_call_s_trace_goes_on_in_the_core(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from deltaline_server.telemetry.tracing import Tracing

    exporter = InMemorySpanExporter()  # type: ignore[no-untyped-call,unused-ignore]
    monkeypatch.setattr(app, "begin_tracing", lambda config, clock: Tracing(SimpleSpanProcessor(exporter), clock))
    async with make_server(front_ends=1) as server, grpc.aio.insecure_channel(server.address) as channel:
        call: Any = channel.unary_unary("/deltaline.v1.AdminService/GetServerInfo")
        await call(b"", metadata=(("traceparent", f"00-{7:032x}-{5:016x}-01"),))
        await until(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    assert span.name == "deltaline.v1.AdminService/GetServerInfo"
    assert span.context is not None and span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (7, 5)
