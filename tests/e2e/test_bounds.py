"""What clients may make a gRPC port hold, the core's and a front end's: floods, and clients that stop."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from rigs.prefill_step import prefill_step
from rigs.raw_http2 import RawHttp2, message, raw_http2
from rigs.until import until

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server.app import Server
from deltaline_server.front.ends.reader import REQUESTS
from deltaline_server.front.grpc_port import MAX_STREAMS
from deltaline_server.front.port import descriptors, gate
from deltaline_server.front.port.gate import CLIENT_UNREAD_BYTES, RECEIVED

LAYER = "/deltaline.v1.LayerService"
TOKENS, HIDDEN = 2048, 64
DESCRIBE = pb.DescribeSequencesRequest(server_epoch=1, sequence=[1]).SerializeToString()


@pytest.fixture(params=[0, 1], ids=["core", "front_end"])
async def server(
    request: pytest.FixtureRequest, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Server]:
    """Whose port is the core's, or a front end's; a test leaves nothing behind in either."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    async with make_server(front_ends=request.param) as server:
        yield server
        await until(lambda: not (server.gate.calls.used or server.gate.unread.used or server.front_ends.num_calls))


def resident_bytes(server: Server) -> int:
    """Of the process that speaks gRPC."""
    pid = (server.front_ends.pids or [os.getpid()])[0]
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def refusals(server: Server, reason: str) -> float:
    """How many the metrics count."""
    return server.metrics.registry.get_sample_value("deltaline_refused_total", {"reason": reason}) or 0.0


async def describe(channel: Any) -> None:
    """A small call. Raises what it ends with."""
    await channel.unary_unary(f"{LAYER}/DescribeSequences")(DESCRIBE, wait_for_ready=True, timeout=60)


async def prefill(stub: Any, tokens: int = TOKENS) -> bytes:
    """A step that is done, whose reply every repetition gets, of `tokens` x 256 bytes."""
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    step = prefill_step(opened, wire.encode(np.ones((tokens, HIDDEN), np.float32)))
    await stub.Step(step)
    return step.SerializeToString()


def reason_of(error: grpc.aio.AioRpcError) -> tuple[str, str, bool]:
    """Its code, its reason, and whether it says when to come again."""
    made = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details = status_pb2.Status.FromString(made).details
    return (
        error.code().name,
        "".join(info.reason for one in details if one.Unpack(info)),
        any(one.Unpack(retry) for one in details),
    )


@pytest.mark.parametrize("server", [0], indirect=True, ids=["core"])
async def test_replies_that_nobody_reads_are_bounded(server: Server) -> None:
    """A client that takes no reply is refused further ones, before anything is done for them; others are not.

    Of a front end, which gives gRPC fewer: test_unread_replies.py.
    """
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        step = await prefill(stub)
        before = resident_bytes(server)

        def ask(count: int) -> int:
            """Make calls one by one; how many were refused."""
            for _ in range(count):
                stream = stopped.call(f"{LAYER}/Step", step)
                stopped.read_until(lambda stream=stream: stream in stopped.headers)  # type: ignore[misc]
            return len(stopped.ended)

        with raw_http2(server.address, window=0) as stopped:
            num_calls = 4 * CLIENT_UNREAD_BYTES // len(step)
            num_refused = await asyncio.to_thread(ask, num_calls)
            assert abs((num_calls - num_refused) * len(step) - CLIENT_UNREAD_BYTES) <= 2 * len(step)
            # gRPC has them twice, as Python's bytes and as its own.
            assert resident_bytes(server) - before < 3 * CLIENT_UNREAD_BYTES
            await until(lambda: refusals(server, "REPLIES_UNREAD") == num_refused)
            again = await stub.Step(pb.StepRequest.FromString(step))
            assert len(again.hidden.inline) == TOKENS * HIDDEN * 4


async def flood(
    address: str, method: str, body: bytes, count: int, num_channels: int
) -> Counter[tuple[str, str, bool]]:
    """Make calls all at once; what became of them."""
    async with AsyncExitStack() as stack:
        apart = [("grpc.use_local_subchannel_pool", 1)]
        channels: list[Any] = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=apart))
            for _ in range(num_channels)
        ]
        calls = [channels[i % num_channels].unary_unary(method)(body) for i in range(count)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
    return Counter(reason_of(end) if isinstance(end, grpc.aio.AioRpcError) else ("OK", "", False) for end in ends)


@pytest.mark.parametrize("num_channels", [1, 20])
async def test_thousands_of_calls_at_once_are_answered_or_refused(server: Server, num_channels: int) -> None:
    """gRPC's own limit of calls that wait ended them as CANCELLED, without a word."""
    ends = await flood(server.address, f"{LAYER}/DescribeSequences", DESCRIBE, 4000, num_channels)
    assert set(ends) <= {("OK", "", False), ("RESOURCE_EXHAUSTED", "TOO_MANY_CALLS", True)}, ends
    assert ends["OK", "", False] > 1000


async def test_calls_that_are_cancelled_at_once_end_no_other_s(server: Server) -> None:
    def cancel() -> None:
        for _ in range(5):
            with raw_http2(server.address) as hostile:
                for stream in [hostile.begin(f"{LAYER}/DescribeSequences") for _ in range(MAX_STREAMS)]:
                    hostile.cancel(stream)

    cancelling = asyncio.gather(*(asyncio.to_thread(cancel) for _ in range(4)))
    async with grpc.aio.insecure_channel(server.address) as channel:
        num_answered = 0
        while not cancelling.done() or num_answered < 50:
            await describe(channel)
            num_answered += 1
    await cancelling
    await until(lambda: not server.gate.calls.used)  # nor does one that is cancelled keep its place


async def test_requests_half_sent_hold_up_no_other(server: Server) -> None:
    """Few are received at a time; where others wait, one that does not come makes way.

    A front end receives REQUESTS of a connection at a time: there it takes several to hold all places.
    """
    half, count = message(bytes(100_000))[:1000], RECEIVED // REQUESTS if server.front_ends.pids else 1

    def send() -> None:
        for slow in connections:
            for _ in range(2 * RECEIVED // count):
                slow.send(slow.begin(f"{LAYER}/Step"), half, ends=False)
        for slow in connections:
            slow.read_until(lambda slow=slow: len(slow.ended) >= RECEIVED // count)  # type: ignore[misc]

    with ExitStack() as stack:
        connections = [stack.enter_context(raw_http2(server.address)) for _ in range(count)]
        sending = asyncio.create_task(asyncio.to_thread(send))
        async with grpc.aio.insecure_channel(server.address) as channel:
            async with asyncio.timeout(20):
                while not sending.done():
                    await describe(channel)
                await describe(channel)
        await sending
        assert all(len(slow.ended) >= RECEIVED // count for slow in connections)
        await until(lambda: refusals(server, "UPLOAD_TIMEOUT") >= RECEIVED)


async def test_one_connection_leaves_calls_for_others(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it has in flight, it is refused more long before others are."""
    monkeypatch.setattr(gate, "MAX_CALLS", 40)
    async with make_server() as server:

        def fill(connection: RawHttp2, most: int) -> None:
            for _ in range(30):
                connection.begin(f"{LAYER}/StepStream")
            connection.read_until(lambda: len(connection.ended) == 30 - most)

        with raw_http2(server.address) as greedy, raw_http2(server.address) as other:
            await asyncio.to_thread(fill, greedy, 20)
            await asyncio.to_thread(fill, other, 10)
            assert server.gate.calls.used == 30 and refusals(server, "TOO_MANY_CALLS") == 30
            async with grpc.aio.insecure_channel(server.address) as channel:
                await describe(channel)
        await until(lambda: not server.gate.calls.used)


async def test_a_port_closes_connections_beyond_its_most(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "MAX_CONNECTIONS", 20)
    async with make_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        await describe(channel)
        host, _, port = server.address.rpartition(":")
        with ExitStack() as stack:
            connected = [stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(40)]

            def num_closed() -> int:
                closed = 0
                for one in connected:
                    one.settimeout(0)
                    with suppress(BlockingIOError):
                        while one.recv(1 << 16):
                            pass
                        closed += 1
                return closed

            await until(lambda: num_closed() == 21)
            await describe(channel)
        async with grpc.aio.insecure_channel(server.address) as late:
            await describe(late)
