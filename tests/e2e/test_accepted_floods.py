"""Floods of calls that are accepted, by every way: beside another principal's calls they begin at a pace, and those do
not wait.

The pace is so slow here that none begins while a test looks: what has begun is a number, whatever else the machine
does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.principals import entry, token_of, write_principals
from rigs.small_models import HIDDEN
from rigs.until import until

from deltaline_client import AsyncClient
from deltaline_server.app import Server
from deltaline_server.front.trust import fair_calls
from deltaline_server.step import StepRequest

CALLS, CONNECTIONS = 16, 2
FOR_EVER_S = 3600.0
NUM_PUT_OFF = "deltaline_calls_put_off_total"
pytestmark = pytest.mark.parametrize("device", ["cpu"])


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was there stays, and others then begin nothing beyond as many as it has at a time."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of front ends
    monkeypatch.setattr(fair_calls, "LEAST_PER_S", 1 / FOR_EVER_S)
    monkeypatch.setattr(fair_calls, "ACTIVE_S", FOR_EVER_S)


@pytest.fixture(params=["front ends", "link"])
async def place(
    request: pytest.FixtureRequest, make_server: Callable[..., Server], tmp_path: Path
) -> AsyncIterator[tuple[Server, Callable[[], AsyncClient], AsyncClient]]:
    """A server, what makes a client of a flood's with a connection of its own, and another principal's client."""
    path = write_principals(tmp_path / "principals.toml", entry("mallory", "step"), entry("victim", "step"))
    link = str(tmp_path / "run" / "link.sock") if request.param == "link" else "off"
    front_ends = 2 if request.param == "front ends" else 0
    async with make_server(principals=path, link=link, front_ends=front_ends, max_sequences=64) as server:
        address = server.address if link == "off" else f"link:{link}"
        async with AsyncClient(address, token=token_of("victim")) as victim:
            yield server, lambda: AsyncClient(address, token=token_of("mallory")), victim


class Held:
    """Keeps steps of a principal from the scheduler until they are let go."""

    def __init__(self, server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._submit: Callable[..., None] = server.runtime.scheduler.submit
        self._name, self.taken = name, list[tuple[Any, ...]]()
        monkeypatch.setattr(server.runtime.scheduler, "submit", self.submit)

    def submit(self, request: StepRequest, *rest: Any) -> None:
        if request.principal.name == self._name:
            self.taken.append((request, *rest))
        else:
            self._submit(request, *rest)

    def let_go(self) -> None:
        for arguments in self.taken:
            self._submit(*arguments)


async def test_a_flood_begins_as_much_as_another_has_and_ends_well(
    place: tuple[Server, Callable[[], AsyncClient], AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, connect, victim = place
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect()) for _ in range(CONNECTIONS)]
        flooding = [await client.open_many(CALLS // CONNECTIONS) for client in clients]
        sequence = await victim.open()
        held, told = Held(server, "mallory", monkeypatch), server.metrics.registry.get_sample_value
        hidden = np.ones(HIDDEN, np.float32)
        steps = [asyncio.create_task(one.decode(hidden)) for sequences in flooding for one in sequences]
        # One as the victim has one at a time, and one at its pace; of a stream one waits, and none behind it is read.
        await until(lambda: len(held.taken) == 2 and (told(NUM_PUT_OFF) or 0) >= CONNECTIONS)
        for _ in range(20):
            await sequence.decode(hidden)
        await victim.renew([sequence])
        assert len(held.taken) == 2
        monkeypatch.setattr(fair_calls, "ACTIVE_S", 1e-3)
        await until(lambda: len(held.taken) == CALLS)
        held.let_go()
        assert len(await asyncio.gather(*steps)) == CALLS
