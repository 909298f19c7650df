"""Front ends end to end: what comes through them is what the core says, and their end, or the core's, harms nothing."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from rigs.adapter_fleet import MAX_RANK, Fleet, Tenant
from rigs.layer_calls import TRIES, UNTOLD
from rigs.programs import Program, run_together
from rigs.raw_http2 import raw_http2
from rigs.server_process import ServerProcess, is_alive
from rigs.until import until

from deltaline.v1 import adapter_service_pb2, admin_service_pb2, layer_service_pb2, state_service_pb2
from deltaline_client import AsyncClient, Retry
from deltaline_server import app
from deltaline_server.app import Server, StartError
from deltaline_server.front.ends.memory import most_bytes
from deltaline_server.front.grpc_port import MESSAGE_SLACK_BYTES

METHODS = [
    method
    for module in (
        *(layer_service_pb2, state_service_pb2, adapter_service_pb2, admin_service_pb2),
        *(health_pb2, reflection_pb2),
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
# What well-formed calls of them do is not the same twice.
CHANGING = ("CreateSharedMemory", "Drain")
CHECK = "/grpc.health.v1.Health/Check"
RETRY = Retry(initial_backoff_s=0.01, max_backoff_s=0.1)
WITH_BOTH = {"front_ends": 1, "adapter_bytes": 1 << 20, "max_adapter_rank": MAX_RANK, "shared_memory_bytes": 1 << 22}


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch, watched: None) -> None:
    """What this process imports, its front ends do."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
async def both(make_server: Callable[..., Server], tmp_path: Path) -> AsyncIterator[tuple[Server, list[str]]]:
    """A server, and its addresses: by a front end, and of the core itself."""
    uds = str(tmp_path / "s")
    async with make_server(uds=uds, **WITH_BOTH) as server:
        yield server, [server.address, f"unix:{uds}"]
        server.runtime.scheduler.settle()
        server.runtime.table.check_integrity()


async def said(channel: grpc.aio.Channel, method: MethodDescriptor, body: bytes) -> Any:
    """All that a call with one message tells: replies, code, details and trailing metadata."""
    for _ in range(TRIES):
        told = await said_once(channel, method, body)
        if told[2:3] != (UNTOLD,):
            break
    return told


async def said_once(channel: grpc.aio.Channel, method: MethodDescriptor, body: bytes) -> Any:
    """What `said` tells, unless grpc.aio's client lost it: then UNTOLD are the details."""
    kinds: Any = {
        (False, False): channel.unary_unary,
        (True, False): channel.stream_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    path = f"/{method.containing_service.full_name}/{method.name}"
    messages = iter([body]) if method.client_streaming else body
    call = kinds[method.client_streaming, method.server_streaming](path)(messages, timeout=60)
    replies = []
    try:
        if method.name == "Watch" and body != b"\xff":  # it does not end
            replies.append(await call.read())
            call.cancel()
            return (replies,)
        replies = [reply async for reply in call] if method.server_streaming else [await call]
    except grpc.aio.AioRpcError:
        pass
    return replies, await call.code(), await call.details(), set(await call.trailing_metadata())


@pytest.mark.parametrize("body", [b"", b"\xff", b"\x08\x90\x4e"], ids=["empty", "malformed", "10000"])
async def test_every_method_says_what_it_says_without_a_front_end(both: tuple[Server, list[str]], body: bytes) -> None:
    server, addresses = both
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(address)) for address in addresses]
        for method in METHODS:
            if method.name not in CHANGING or body == b"\xff":
                through, direct = [await said(channel, method, body) for channel in channels]
                assert through == direct, method.full_name
        opening = METHODS[[method.name for method in METHODS].index("OpenSequences")]
        await said(channels[0], opening, b"\x08\x01")
        all_lines = layer_service_pb2.OpenSequencesRequest(count=server.config.max_sequences).SerializeToString()
        through, direct = [await said(channel, opening, all_lines) for channel in channels]
        assert through == direct and "grpc-retry-pushback-ms" in dict(through[-1])
        server.drain()
        through, direct = [await said(channel, opening, b"\x08\x01") for channel in channels]
        assert through == direct and "grpc-status-details-bin" in dict(through[-1])


async def test_results_are_those_without_a_front_end(both: tuple[Server, list[str]]) -> None:
    server, addresses = both
    fleet, hashes, results = Fleet(server.config, 1), list[bytes](), list[list[list[Any]]]()
    programs = [Program.draw(seed, 6, 64, lengths=(1, 17, 900)) for seed in range(3)]
    for number, address in enumerate(addresses):
        async with (
            AsyncClient(address, shared_memory_bytes=1 << 20) as client,
            grpc.aio.insecure_channel(address) as channel,
        ):
            tenant = Tenant(client, channel)
            loaded = await tenant.load(fleet.upload(f"a{number}", 0))
            sequences = [*await client.open_many(2), *await client.open_many(1, adapter=f"a{number}")]
            hashes.append(loaded.adapter.content_hash)
            results.append(await run_together(client, sequences, programs))
            assert server.runtime.regions.used_bytes
    assert hashes[0] == hashes[1]
    for mine, theirs in zip(*(chain(*outputs) for outputs in results), strict=True):
        np.testing.assert_array_equal(mine, theirs)


async def test_what_a_stranger_sends_in_headers_ends_no_call_of_others(both: tuple[Server, list[str]]) -> None:
    server, (address, _) = both
    async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
        sequence, watch = await client.open(), cast(Any, channel.unary_stream("/grpc.health.v1.Health/Watch"))
        watching = watch(b"", timeout=60)
        assert (await watching.read()) is not grpc.aio.EOF
        with raw_http2(address) as stranger:
            calls = [stranger.call(CHECK, b"", **headers) for headers in ({"x-test": b"a\0b"}, {"x\0test": b"v"})]
            await asyncio.to_thread(stranger.read_until, lambda: stranger.ended.issuperset(calls))
            assert stranger.received[calls[0]]  # it is answered as any; gRPC refuses the other
        await sequence.decode(np.ones(64, np.float32))
        assert not watching.done() and server.front_ends.num_restarts == 0
        watching.cancel()


async def test_a_step_is_its_client_s_and_not_the_front_end_s(
    both: tuple[Server, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, (address, _) = both
    submit, seen = server.runtime.scheduler.submit, set()

    def noted(step: Any, *rest: Any) -> None:
        seen.add(step.client)
        submit(step, *rest)

    monkeypatch.setattr(server.runtime.scheduler, "submit", noted)
    async with AsyncClient(address) as client:
        await (await client.open()).decode(np.ones(64, np.float32))
    assert len(seen) == 1 and seen.pop().startswith("ipv4:127.0.0.1:")


async def test_front_ends_that_are_killed_under_clients_lose_nothing(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [Program.draw(seed, 40, 64, lengths=(1, 2, 40, 900)) for seed in range(6)]
    async with make_server(front_ends=2, metrics_port=0) as server:

        async def run(mine: list[Program]) -> tuple[list[Any], list[Any]]:
            async with AsyncClient(server.address, retry=RETRY) as client:
                sequences = await client.open_many(len(mine))
                outputs = await run_together(client, sequences, mine)
                described = await client.describe(sequences)
                return outputs, [one.spans[0] for one in described]

        submit, killed, submitted = server.runtime.scheduler.submit, set[int](), 0

        def noted(step: Any, *rest: Any) -> None:
            nonlocal submitted
            submitted += 1
            if submitted % 40 == 0 and len(killed) < 4:
                pid = server.front_ends.pids[0]  # there is one: that by which the step came
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            submit(step, *rest)

        monkeypatch.setattr(server.runtime.scheduler, "submit", noted)
        disturbed = await asyncio.gather(*(run([program]) for program in programs))
        assert len(killed) > 2
        await until(lambda: len(server.front_ends.pids) == 2)
        page = await asyncio.to_thread(lambda: urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics").read())
        assert b"deltaline_front_ends 2.0" in page
        assert f"deltaline_front_end_restarts_total {len(killed):.1f}".encode() in page
        assert re.search(rb"^deltaline_front_end_cpu_seconds_total [0-9.]*[1-9]", page, re.M)
        (used,) = re.findall(rb"^deltaline_front_end_memory_bytes (\S+)", page, re.M)
        assert 2 * 2**24 < float(used) < 2 * most_bytes(1 << 20)
        assert b'grpc_method="OpenSequences",grpc_service="deltaline.v1.LayerService"' in page
        calm = [await run([program]) for program in programs]
        for (outputs, spans), (expected, expected_spans) in zip(disturbed, calm, strict=True):
            assert spans == expected_spans
            for mine, theirs in zip(chain(*outputs), chain(*expected), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
        server.runtime.scheduler.settle()
        server.runtime.table.check_integrity()


async def test_signals_to_all_processes_are_the_core_s(both: tuple[Server, list[str]]) -> None:
    server, (address, _) = both
    (pid,) = server.front_ends.pids
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    async with AsyncClient(address) as client:
        await client.open()
    assert server.front_ends.pids == [pid]


async def test_the_kernel_bounds_a_front_end_s_memory(both: tuple[Server, list[str]]) -> None:
    server, _ = both
    message_bytes = server.config.inline_limit_bytes + MESSAGE_SLACK_BYTES
    for pid in server.front_ends.pids:
        assert resource.prlimit(pid, resource.RLIMIT_DATA) == (most_bytes(message_bytes),) * 2


async def test_a_stop_lets_replies_leave_and_ends_them(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "STOP_GRACE_S", 60.0)
    async with make_server(front_ends=2) as server, AsyncClient(server.address) as client:
        pids, sequence = server.front_ends.pids, await client.open()
        step = asyncio.ensure_future(sequence.prefill(np.ones((900, 64), np.float32)))
        await until(lambda: server.runtime.scheduler.load().queued_rows or step.done())
        await server.stop()
        assert (await step).shape == (900, 64)
    assert len(pids) == 2 and not any(map(is_alive, pids))


@pytest.mark.parametrize("front_ends", [(1, 1), (1, 0), (0, 1)])
async def test_a_second_server_on_the_port_is_refused(
    make_server: Callable[..., Server], front_ends: tuple[int, int]
) -> None:
    first, second = front_ends
    async with make_server(front_ends=first) as server:
        with pytest.raises(StartError, match=r"--host, --port: can't listen on .*another server runs there"):
            async with make_server(front_ends=second, port=server.port):
                pass
        async with AsyncClient(server.address) as client:
            await client.open()


async def test_front_ends_end_with_a_core_that_is_killed(tmp_path: Path) -> None:
    async with ServerProcess(tmp_path, "--front-ends", "2") as core:
        pids = core.front_ends
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGSTOP)  # it can't see the end of its socket
        core.kill()
        await until(lambda: not any(map(is_alive, pids)))
