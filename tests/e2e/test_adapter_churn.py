"""Adapters come and go while sequences live and die: every output is its own adapter's."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_status import rpc_status
from rigs.adapter_fleet import MAX_RANK, Fleet, Tenant
from rigs.programs import Program, relative_error, run_together
from rigs.target import HIDDEN, reason_of

from deltaline_client import AsyncClient
from deltaline_server.app import Server

TOLERANCE = 1e-4
NUM_CLIENTS, NUM_SLOTS = 8, 8


class Churn:
    """What the clients share. Each name has two contents, of which it has one or none at a time."""

    def __init__(self, fleet: Fleet, root: Path) -> None:
        self.fleet = fleet
        self.counts: Counter[str] = Counter()
        self.errors: list[float] = []
        for i in range(0, len(fleet.hashes), 2):
            fleet.write(root, self.name(i), i)

    def name(self, adapter: int) -> str:
        return f"adapter-{adapter // 2}"

    async def one_client(self, number: int, num_sequences: int, address: str) -> None:
        rng = random.Random(number)
        async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
            tenant = Tenant(client, channel)
            while num_sequences:
                count = min(num_sequences, rng.randint(1, 8))
                num_sequences -= count
                await self.some_sequences(tenant, rng, count)

    async def some_sequences(self, tenant: Tenant, rng: random.Random, count: int) -> None:
        """Sequences of a few adapters, stepped together or side by side."""
        opened: list[tuple[Any, bytes]] = []
        while len(opened) < count:
            adapter = rng.randrange(-20, len(self.fleet.hashes))
            sequences, content_hash = await self.open(tenant, rng, adapter, min(rng.randint(1, 2), count - len(opened)))
            opened += [(sequence, content_hash) for sequence in sequences]
        programs = [Program.draw(rng.getrandbits(40), rng.randint(1, 3), HIDDEN, lengths=(1, 3, 17)) for _ in opened]
        if rng.random() < 0.5:
            outputs = await run_together(tenant.client, [sequence for sequence, _ in opened], programs)
        else:
            pairs = zip(opened, programs, strict=True)
            alone = [run_together(tenant.client, [sequence], [program]) for (sequence, _), program in pairs]
            outputs = [output for [output] in await asyncio.gather(*alone)]
        await tenant.client.close([sequence for sequence, _ in opened])
        for (_, content_hash), program, output in zip(opened, programs, outputs, strict=True):
            expected = await asyncio.to_thread(self.fleet.expected, program, content_hash)
            self.errors.append(max(relative_error(a, e) for a, e in zip(output, expected, strict=True)))

    async def open(self, tenant: Tenant, rng: random.Random, adapter: int, count: int) -> tuple[list[Any], bytes]:
        """Open sequences with what the name of an adapter means now; load it where it means nothing."""
        name = self.name(adapter) if adapter >= 0 else ""
        while True:
            try:
                opened = await tenant.open(name, count)
                break
            except grpc.aio.AioRpcError as error:
                self.count(error, "ADAPTER_UNKNOWN", "NO_FREE_LINES")
            await self.load(tenant, adapter)
        if name and rng.random() < 0.15:
            try:
                await tenant.unload(name, drain=rng.random() < 0.7)
                self.counts["unloaded"] += 1
            except grpc.aio.AioRpcError as error:
                self.count(error, "ADAPTER_UNKNOWN", "ADAPTER_IN_USE")
        return opened

    async def load(self, tenant: Tenant, adapter: int) -> None:
        """The even ones from the folder, the others from bytes."""
        name = self.name(adapter)
        try:
            await tenant.load(name if adapter % 2 == 0 else self.fleet.upload(name, adapter))
            self.counts["loaded"] += 1
        except grpc.aio.AioRpcError as error:
            self.count(error, "ADAPTER_EXISTS", "ADAPTER_BYTES_EXHAUSTED")

    def count(self, error: grpc.aio.AioRpcError, *expected: str) -> None:
        status = rpc_status.from_call(error)
        assert status is not None and reason_of(status) in expected, error.details()
        self.counts[reason_of(status)] += 1


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So many small products on both sides of the wire are quicker without threads that wait for one another."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("num_adapters", "num_sequences"), [(60, 160), pytest.param(200, 2000, marks=pytest.mark.sweep)]
)
async def test_many_adapters_over_8_slots(
    make_server: Callable[..., Server], tmp_path: Path, num_adapters: int, num_sequences: int
) -> None:
    root = tmp_path / "root"
    options = {"adapter_root": str(root), "adapter_slots": NUM_SLOTS, "max_adapter_rank": MAX_RANK}
    root.mkdir()
    fleet = Fleet(make_server(**options, adapter_bytes=1).config, num_adapters)
    churn = Churn(fleet, root)
    # Host memory for a third of them.
    limit_bytes = sum(fleet.num_bytes) // 3
    async with make_server(**options, adapter_bytes=limit_bytes, max_sequences=64) as server:
        clients = [churn.one_client(i, num_sequences // NUM_CLIENTS, server.address) for i in range(NUM_CLIENTS)]
        await asyncio.gather(*clients)
        server.runtime.scheduler.settle()
        table, adapters = server.runtime.table, server.runtime.adapters
        assert adapters is not None
        table.check_integrity()
        assert (table.num_open, table.adapters.num_bound, adapters.registry.bound()) == (0, 0, {})
        assert server.runtime.scheduler.adapter_wait.num_waiting == 0
        assert len(churn.errors) == num_sequences and max(churn.errors) < TOLERANCE
        # It was a churn.
        registry = adapters.registry
        assert registry.places.num_evicted > num_sequences // 8 and registry.num_evicted > 5
        assert churn.counts["unloaded"] and churn.counts["ADAPTER_UNKNOWN"] > 20
