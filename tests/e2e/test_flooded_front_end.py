"""A front end that is flooded until the kernel gives it no more memory: it ends, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.programs import Program, run_together
from rigs.small_models import HIDDEN
from rigs.target import LAYER
from rigs.until import until

from deltaline_client import AsyncClient, Retry
from deltaline_server.app import Server
from deltaline_server.front.ends.reader import REQUESTS

NUM_FLOODERS, MESSAGE = 24, bytes(4 * 2**20)
# Of the front end that is flooded, so that it takes no gigabyte; its own is the kernel's to keep as well.
LIMIT_BYTES = 200 * 2**20
RETRY = Retry(initial_backoff_s=0.01, max_backoff_s=0.1)


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process imports, its front ends do."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


async def flood(address: str, num_clients: int, calls_each: int) -> set[grpc.StatusCode]:
    """Clients that all send large messages at once; how their calls ended."""
    async with AsyncExitStack() as stack:
        calls = []
        for _ in range(num_clients):
            made = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            channel: Any = await stack.enter_async_context(made)
            calls += [channel.unary_unary(LAYER + "Step")(MESSAGE) for _ in range(calls_each)]
        return {await call.code() for call in calls}


def data_bytes(pid: int) -> int:
    """What RLIMIT_DATA counts of a process, stacks of threads too: gRPC makes more of them where more cores are."""
    return next(
        int(line.split()[1]) * 1024
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmData")
    )


async def test_of_a_client_s_requests_some_are_read_at_a_time(make_server: Callable[..., Server]) -> None:
    async with make_server(front_ends=1) as server:
        (pid,) = server.front_ends.pids
        resource.prlimit(pid, resource.RLIMIT_DATA, (data_bytes(pid) + 2 * LIMIT_BYTES,) * 2)
        num_calls = 3 * LIMIT_BYTES // len(MESSAGE)
        assert await flood(server.address, 1, num_calls) == {grpc.StatusCode.INVALID_ARGUMENT}
        assert server.front_ends.pids == [pid]


async def test_a_flooded_front_end_ends_alone(make_server: Callable[..., Server]) -> None:
    programs = [Program.draw(seed, 60, HIDDEN) for seed in range(4)]

    async def run(address: str, mine: list[Program]) -> list[list[Any]]:
        async with AsyncClient(address, retry=RETRY) as client:
            return await run_together(client, await client.open_many(len(mine)), mine)

    async with make_server(front_ends=2) as server:
        expected = await run(server.address, programs)
        flooded, other = server.front_ends.pids
        resource.prlimit(flooded, resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        flooding = asyncio.create_task(flood(server.address, NUM_FLOODERS, REQUESTS // 2))
        outputs = await asyncio.gather(*(run(server.address, [program]) for program in programs))
        codes = await flooding
        codes.discard(grpc.StatusCode.DEADLINE_EXCEEDED)  # of a request that came too slowly while others waited
        assert codes == {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT}
        await until(lambda: len(server.front_ends.pids) == 2)
        assert other in server.front_ends.pids and flooded not in server.front_ends.pids
        assert server.front_ends.num_restarts == 1
        for (mine,), theirs in zip(outputs, expected, strict=True):
            for one, wanted in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-4)
        server.runtime.scheduler.settle()
        server.runtime.table.check_integrity()
