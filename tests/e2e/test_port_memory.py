"""What clients make a process take is what `deltaline size` prints beforehand, and part by part what it counts with."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.limited_server import Limited, limited
from rigs.prefill_step import prefill_step
from rigs.raw_http2 import RawHttp2, raw_http2

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server.front.grpc_port import MAX_STREAMS, MESSAGE_SLACK_BYTES
from deltaline_server.front.port.descriptors import MAX_CONNECTIONS
from deltaline_server.front.port.gate import CLIENT_UNREAD_BYTES
from deltaline_server.front.port.memory import CALL_BYTES, CONNECTION_BYTES, COPIES, most_bytes
from deltaline_server.sizing.__main__ import main

LAYER = "/deltaline.v1.LayerService"
HIDDEN, TOKENS = 64, 14_000  # a reply of 3.4 MiB
REPLY_BYTES = HIDDEN * TOKENS * 4
# Of a step on its way, and of allocations that come and go.
SLACK_BYTES = 64 * 2**20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Limited]:
    with limited(tmp_path, num_files=4096) as server:
        yield server


def resident_bytes(server: Limited) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def step_of(server: Limited) -> bytes:
    """A step that is done: its repetition has the same large reply."""
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        opened = stub.OpenSequences(pb.OpenSequencesRequest(count=1))
        step = prefill_step(opened, wire.encode(np.ones((TOKENS, HIDDEN), np.float32)))
        stub.Step(step)
    return step.SerializeToString()


def stop_reading(stack: ExitStack, server: Limited, step: bytes, num_clients: int, num_calls: int) -> None:
    """Clients that take no reply."""
    for _ in range(num_clients):
        stopped = stack.enter_context(raw_http2(server.address, window=0))
        for _ in range(num_calls):
            stream = stopped.call(f"{LAYER}/Step", step)
            stopped.read_until(lambda to=stopped, at=stream: at in to.headers)  # type: ignore[misc]


def idle(stack: ExitStack, server: Limited, num_streams: int, num_each: int) -> None:
    """Streams that carry nothing, once the server has taken them up."""
    for first in range(0, num_streams, num_each):
        one: RawHttp2 = stack.enter_context(raw_http2(server.address))
        for _ in range(min(num_each, num_streams - first)):
            one.begin(f"{LAYER}/StepStream")
        last = one.call(f"{LAYER}/DescribeSequences", b"")  # behind them
        one.read_until(lambda to=one, at=last: at in to.ended)  # type: ignore[misc]


def half_open(stack: ExitStack, server: Limited, count: int) -> None:
    """Connections that say nothing; the server closes those beyond its most."""
    host, _, port = server.address.rpartition(":")
    for _ in range(count):
        stack.enter_context(socket.create_connection((host, int(port)), 60))


def test_parts_take_no_more_than_they_are_counted_with(server: Limited) -> None:
    step = step_of(server)
    with ExitStack() as stack:
        half_open(stack, server, 10)
        idle(stack, server, 10, 10)
        before = resident_bytes(server)
        half_open(stack, server, 800)
        connected = resident_bytes(server)
        assert connected - before <= 800 * CONNECTION_BYTES
        idle(stack, server, 600, 300)
        assert resident_bytes(server) - connected <= 600 * CALL_BYTES
    before = resident_bytes(server)
    with ExitStack() as stack:
        stop_reading(stack, server, step, 2, 24)
        assert resident_bytes(server) - before <= 2 * COPIES * (CLIENT_UNREAD_BYTES + REPLY_BYTES) + SLACK_BYTES


@pytest.mark.sweep
def test_all_at_once_take_no_more_than_is_printed_beforehand(
    server: Limited, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 12_000)), hard))
    monkeypatch.setattr("sys.argv", ["size", "--random-init", str(tmp_path / "config.json"), "--device", "cpu"])
    assert main() == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "gRPC's clients" in line]
    printed = int(line.partition(": ")[2].partition(" bytes")[0].replace(",", ""))
    assert printed == most_bytes(2**22 + MESSAGE_SLACK_BYTES)
    step = step_of(server)
    before = resident_bytes(server)
    with ExitStack() as stack:
        idle(stack, server, 1000, MAX_STREAMS // 2)
        idled = resident_bytes(server)
        stop_reading(stack, server, step, 12, 40)
        stopped = resident_bytes(server)
        half_open(stack, server, 10_000)
        grown = resident_bytes(server) - before
    with capsys.disabled():
        parts = [part >> 20 for part in (idled - before, stopped - idled, grown + before - stopped, grown)]
        print(f"\nidle streams, stopped readers, half-open connections, all: {parts} MiB; {line}")
    assert grown <= printed and MAX_CONNECTIONS < 10_000
