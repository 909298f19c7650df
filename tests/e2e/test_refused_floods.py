"""Floods of calls that are refused, by every way: a burst of them reaches the core, then as many as are on their way
wait for their answers, and nobody else for anything.

Turns are so far apart here that none comes while a test runs: what reached the core is a number, whatever else the
machine does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.principals import entry, headers, token_of, write_principals
from rigs.small_models import HIDDEN
from rigs.until import until
from rigs.ways import Way, grpc_way, link_way

from deltaline import wire
from deltaline.v1 import admin_service_pb2, layer_service_pb2
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_client import AsyncClient, Retry, Unavailable
from deltaline_server.app import Server
from deltaline_server.front.trust import refusals

BURST, CALLS, CONNECTIONS = 10, 24, 2
HOLD_S = 3600.0
LAYER = layer_service_pb2.DESCRIPTOR.services_by_name["LayerService"].methods_by_name
ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].methods_by_name
LOAD = admin_service_pb2.GetLoadRequest().SerializeToString()
TWO = pb.OpenSequencesRequest(count=2).SerializeToString()
GUESSES = [number << 24 for number in range(1, 65)]
# Why each is refused: the method, its message, the token.
FLOODS = {
    "QUOTA_EXCEEDED": (LAYER["OpenSequences"], TWO, "mallory"),
    "ROLE_MISSING": (ADMIN["Drain"], b"", "mallory"),
    "CREDENTIALS_UNKNOWN": (LAYER["Step"], b"", "nobody"),
    "INVALID_REQUEST": (LAYER["Step"], b"\xff", "mallory"),
    "TOO_MANY_UNKNOWN": (LAYER["DescribeSequences"], None, "mallory"),
}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of front ends
    monkeypatch.setattr(refusals, "BURST", BURST)
    monkeypatch.setattr(refusals, "PER_S", 1 / HOLD_S)
    monkeypatch.setattr(refusals, "MAX_HOLD_S", HOLD_S)


@pytest.fixture(params=["core", "front ends", "link"])
async def place(
    request: pytest.FixtureRequest, make_server: Callable[..., Server], tmp_path: Path
) -> AsyncIterator[tuple[Server, Callable[[], Any], AsyncClient]]:
    """A server, what makes a connection to it, and a client of another principal's, which goes the same way."""
    mallory = entry("mallory", "step", quotas={"sequences": 1})
    path = write_principals(tmp_path / "principals.toml", mallory, entry("victim", "step", "admin"))
    link = str(tmp_path / "run" / "link.sock") if request.param == "link" else "off"
    front_ends = 2 if request.param == "front ends" else 0
    async with make_server(principals=path, link=link, front_ends=front_ends) as server:
        address = server.address if link == "off" else f"link:{link}"

        def connect() -> Any:
            apart = [("grpc.use_local_subchannel_pool", 1)]
            return link_way(link) if address != server.address else grpc_way(_channel(address, apart))

        async with AsyncClient(address, token=token_of("victim"), retry=Retry(max_attempts=1)) as victim:
            yield server, connect, victim


def _channel(address: str, options: Any) -> Any:
    return grpc.aio.insecure_channel(address, options=options)


def num_refused(server: Server, reason: str) -> float:
    return server.metrics.registry.get_sample_value("deltaline_refused_total", {"reason": reason}) or 0.0


@asynccontextmanager
async def flooding(ways: list[Way], server: Server, reason: str) -> AsyncIterator[None]:
    """So many calls at a time, each anew when it is answered."""
    method, body, name = FLOODS[reason]
    if body is None:
        guessed = pb.DescribeSequencesRequest(server_epoch=server.runtime.table.server_epoch, sequence=GUESSES)
        body = guessed.SerializeToString()

    async def go_on(way: Way) -> None:
        while True:
            await way.call(method, [body], headers(name), HOLD_S)

    tasks = [asyncio.create_task(go_on(ways[i % len(ways)])) for i in range(CALLS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("reason", FLOODS)
async def test_few_of_a_flood_reach_the_core_and_others_go_on(
    place: tuple[Server, Callable[[], Any], AsyncClient], reason: str
) -> None:
    server, connect, victim = place
    while True:
        with suppress(Unavailable):
            await victim.info()
            break
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(connect()) for _ in range(CONNECTIONS)]
        async with flooding(ways, server, reason):
            await until(lambda: num_refused(server, reason) == BURST + CALLS)
            sequence = await victim.open()
            for _ in range(20):
                await sequence.decode(np.ones(HIDDEN, np.float32))
            await victim.close([sequence])
            # On the flood's own connections calls that are not refused are answered, and so are another's refusals.
            for way in ways:
                said = await way.call(ADMIN["GetLoad"], [LOAD], headers("mallory"), 60.0)
                assert said.code is grpc.StatusCode.OK
                said = await way.call(LAYER["Step"], [b"\xff"], headers("victim"), 60.0)
                assert said.code is grpc.StatusCode.INVALID_ARGUMENT
            own = BURST + CALLS + (len(ways) if reason == "INVALID_REQUEST" else 0)
            assert num_refused(server, reason) == own


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("place", ["core", "front ends"], indirect=True)
async def test_a_stream_s_refused_steps_wait_and_its_others_do_not(
    place: tuple[Server, Callable[[], Any], AsyncClient],
) -> None:
    server, _, _ = place
    async with grpc.aio.insecure_channel(server.address) as channel:
        call: Any = channel.unary_unary("/deltaline.v1.LayerService/OpenSequences")
        count = pb.OpenSequencesRequest(count=1).SerializeToString()
        opened = pb.OpenSequencesResponse.FromString(
            await call(count, metadata=headers("mallory"), wait_for_ready=True)
        )
        stream: Any = channel.stream_stream("/deltaline.v1.LayerService/StepStream")(metadata=headers("mallory"))
        bad = pb.StepRequest(server_epoch=opened.server_epoch, sequence=opened.sequence, span=9)
        for number in range(1, BURST + 3):
            message = pb.StepStreamRequest(correlation_id=number, step=bad)
            await stream.write(message.SerializeToString())
        answered = [pb.StepStreamResponse.FromString(await stream.read()) for _ in range(BURST)]
        assert [one.correlation_id for one in answered] == list(range(1, BURST + 1))
        assert all(one.HasField("status") for one in answered)
        good = pb.StepRequest(
            server_epoch=opened.server_epoch,
            sequence=opened.sequence,
            kind=[pb.ROW_KIND_DECODE],
            step=[1],
            position=[0],
            accepted=[-1],
            query_start_loc=[0, 1],
        )
        good.hidden.CopyFrom(wire.encode(np.ones((1, HIDDEN), np.float32)))
        await stream.write(pb.StepStreamRequest(correlation_id=99, step=good).SerializeToString())
        answer = pb.StepStreamResponse.FromString(await stream.read())
        assert answer.correlation_id == 99 and list(answer.step.outcome) == [pb.ROW_OUTCOME_EXECUTED]
        stream.cancel()
