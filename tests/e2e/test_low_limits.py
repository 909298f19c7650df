"""A server as a process of its own that may open 256 files, under floods of connections; and what they make it log."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from rigs.limited_server import Limited, limited
from rigs.raw_http2 import message, raw_http2

from deltaline.v1 import layer_service_pb2 as pb

DESCRIBE = "/deltaline.v1.LayerService/DescribeSequences"
BODY = pb.DescribeSequencesRequest(server_epoch=1, sequence=[1]).SerializeToString()
HALF = b"GET /metrics HTTP/1.1\r\n"


@pytest.fixture(params=[0, 1], ids=["core", "front_end"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Limited]:
    with limited(tmp_path, request.param) as server:
        yield server


async def describe(address: str) -> None:
    """A call on a connection of its own. Raises what it ends with."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        await channel.unary_unary(DESCRIBE)(BODY, wait_for_ready=True, timeout=30)  # type: ignore[arg-type]


async def test_connections_to_either_port_leave_the_other_its_descriptors(server: Limited) -> None:
    with ExitStack() as stack:

        def connect(port: int, count: int, says: bytes) -> None:
            for _ in range(count):
                connected = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
                connected.sendall(says)

        await asyncio.to_thread(connect, server.metrics_port, 248, HALF)
        await describe(server.address)
        port = int(server.address.rpartition(":")[2])
        await asyncio.to_thread(connect, port, 248, b"")
        page = await asyncio.to_thread(
            lambda: urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60).read()
        )
        assert b"process_open_fds" in page
        [used] = [float(line.split()[1]) for line in page.splitlines() if line.startswith(b"process_open_fds")]
        assert used < 256 - 16
    await describe(server.address)


async def test_what_clients_do_wrong_is_no_line_of_the_log(server: Limited) -> None:
    """Compressed requests, headers that are no UTF-8, what is no HTTP/2, and clients that leave while they are
    answered."""
    before = len(server.lines())
    async with grpc.aio.insecure_channel(server.address, compression=grpc.Compression.Gzip) as channel:
        call: Any = channel.unary_unary(DESCRIBE)
        ends = await asyncio.gather(*(call(bytes(5000)) for _ in range(100)), return_exceptions=True)
    assert {end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)} == {grpc.StatusCode.UNIMPLEMENTED}

    def leave() -> None:
        for _ in range(20):
            with raw_http2(server.address, window=0) as leaving:
                for _ in range(20):
                    leaving.call(DESCRIBE, BODY)
                leaving.read_until(lambda: len(leaving.headers) == 20)
            with raw_http2(server.address) as odd:
                stream = odd.begin(DESCRIBE, authorization=b"Bearer \xff", traceparent=b"\xfe")
                odd.send(stream, message(BODY))
                odd.read_until(lambda odd=odd, stream=stream: stream in odd.ended)  # type: ignore[misc]
            with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), 60) as wrong:
                wrong.sendall(bytes(range(256)) * 16)

    await asyncio.to_thread(leave)
    await describe(server.address)
    assert server.lines()[before:] == []
