"""Adapters on a whole server: whose rows are whose in one batch, life of names and contents, bad input, slow copies."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_status import rpc_status
from rigs.adapter_fleet import MAX_RANK, Fleet, Tenant
from rigs.programs import Program, relative_error, run_together
from rigs.target import HIDDEN, LEAK, reason_of
from rigs.until import until

from deltaline import wire
from deltaline.v1 import adapter_service_pb2 as pb
from deltaline.v1 import layer_service_pb2 as layer_pb
from deltaline_client import AdapterUnknown, AsyncClient, Prefix, PrefixMiss, Row, Tier
from deltaline_server.adapters.files import AdapterPlan
from deltaline_server.app import Server
from deltaline_server.models.lora_places import AdapterStore

TOLERANCE = 1e-4
LIMIT_BYTES = 1 << 20
RESIDENT, DRAINING = pb.ADAPTER_STATE_RESIDENT, pb.ADAPTER_STATE_DRAINING
MakeServer = Callable[..., Server]


@asynccontextmanager
async def serving(make_server: MakeServer, address: str = "", **options: Any) -> AsyncIterator[tuple[Server, Tenant]]:
    """A server with adapters, and a tenant; nothing is left over in the end."""
    server = make_server(**{"adapter_bytes": LIMIT_BYTES, "max_adapter_rank": MAX_RANK} | options)
    async with server:
        address = address or server.address
        async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
            yield server, Tenant(client, channel)
        server.runtime.scheduler.settle()
        server.runtime.table.check_integrity()


@contextmanager
def refused(code: str, reason: str) -> Iterator[None]:
    """What is inside is refused with this code and reason, in words that tell nothing of the inside."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        yield
    status = rpc_status.from_call(error.value)
    assert status is not None and (error.value.code().name, reason_of(status)) == (code, reason)
    assert not LEAK.search(error.value.details() or ""), error.value.details()


def check(fleet: Fleet, programs: list[Program], outputs: list[list[Any]], hashes: list[bytes]) -> None:
    """Every output is that of its own adapter, alone."""
    for program, output, content_hash in zip(programs, outputs, hashes, strict=True):
        expected = fleet.expected(program, content_hash)
        assert max(relative_error(a, e) for a, e in zip(output, expected, strict=True)) < TOLERANCE


def draw(count: int, seed: int = 0, num_steps: int = 4) -> list[Program]:
    return [Program.draw(seed + i, num_steps, HIDDEN, lengths=(1, 3, 17, 70)) for i in range(count)]


async def test_rows_of_many_adapters_and_of_none_in_one_batch(make_server: MakeServer, tmp_path: Path) -> None:
    uds = str(tmp_path / "s")
    address, options = f"unix:{uds}", {"uds": uds, "adapter_slots": 4, "adapter_root": str(tmp_path)}
    async with serving(make_server, address, **options) as (server, tenant):
        fleet = Fleet(server.config, 4)
        for i in range(4):
            fleet.write(tmp_path, f"a{i}", i)
        loaded = [
            await tenant.load(f"a{i}") if i % 2 else await tenant.load(fleet.upload(f"a{i}", i)) for i in range(4)
        ]
        assert [response.adapter.content_hash for response in loaded] == fleet.hashes
        opened = [await tenant.client.open_many(2, adapter=name) for name in ("a0", None, "a3", "a1", "a2")]
        sequences = [sequence for pair in opened for sequence in pair]
        hashes = [sequence.adapter_hash for sequence in sequences]
        assert hashes[::2] == [fleet.hashes[0], b"", fleet.hashes[3], fleet.hashes[1], fleet.hashes[2]]
        programs = draw(10)
        check(fleet, programs, await run_together(tenant.client, sequences, programs), hashes)
        assert not is_empty(server)
        alone = [fleet.expected(programs[0], content_hash)[0] for content_hash in (b"", *fleet.hashes)]
        far = [relative_error(a, b) for i, a in enumerate(alone) for b in alone[:i]]
        assert min(far) > 100 * TOLERANCE, "the adapters are too much alike to tell them apart"
        listed = await tenant.listed()
        assert {(one.name, one.state, one.sequences) for one in listed.adapters} == {
            (f"a{i}", RESIDENT, 2) for i in range(4)
        }
        described = await tenant.client.describe(sequences)
        assert [one.adapter_hash for one in described] == hashes
        assert [one.adapter for one in described][::2] == ["a0", None, "a3", "a1", "a2"]
        info = server.runtime.info()
        assert (info.adapter_bytes, info.adapter_slots, info.max_adapter_rank) == (LIMIT_BYTES, 4, MAX_RANK)
        rows = server.metrics.registry.get_sample_value("deltaline_adapter_rows_total", {"adapters": "4"})
        assert rows and rows >= 8


async def test_what_is_in_use_stays_what_it_is(make_server: MakeServer) -> None:
    async with serving(make_server) as (server, tenant):
        fleet = Fleet(server.config, 2)
        await tenant.load(fleet.upload("a", 0))
        (old,), old_hash = await tenant.open("a")
        programs = draw(2, seed=90)
        first = await run_together(tenant.client, [old], [Program(programs[0].steps[:2])])
        with refused("FAILED_PRECONDITION", "ADAPTER_IN_USE"):
            await tenant.unload("a")
        with refused("ALREADY_EXISTS", "ADAPTER_EXISTS"):
            await tenant.load(fleet.upload("a", 1))
        assert await tenant.unload("a", drain=True) == 1
        with refused("NOT_FOUND", "ADAPTER_UNKNOWN"):
            await tenant.open("a")
        await tenant.load(fleet.upload("a", 1))
        (new,), new_hash = await tenant.open("a")
        assert [old_hash, new_hash] == fleet.hashes
        assert [one.state == DRAINING for one in (await tenant.listed()).adapters] == [False, True]
        rest = Program(programs[0].steps[2:])
        outputs = await run_together(tenant.client, [old, new], [rest, programs[1]])
        check(fleet, programs, [first[0] + outputs[0], outputs[1]], [old_hash, new_hash])
        await tenant.client.close([old])
        assert [one.content_hash for one in (await tenant.listed()).adapters] == [new_hash]
        await tenant.client.close([new])
        assert await tenant.unload("a") == 0
        await until(lambda: is_empty(server))


def is_empty(server: Server) -> bool:
    """Whether nothing of any adapter is left on the device."""
    store = server.runtime.model.adapters
    assert store is not None
    layers = [store.layer(layer) for layer in server.runtime.model.layout.layers]
    return not any(weights.a.any() or weights.b.any() for layer in layers for weights in layer.values())


async def test_a_step_sent_again_gets_the_same_bytes_whatever_became_of_its_adapter(make_server: MakeServer) -> None:
    async with serving(make_server, adapter_slots=1) as (server, tenant):
        fleet = Fleet(server.config, 2)
        for i in range(2):
            await tenant.load(fleet.upload(f"a{i}", i))
        (one,), _ = await tenant.open("a0")
        (two,), _ = await tenant.open("a1")
        request = step_of(server, one.handle)
        first = await tenant.layers.Step(request)
        await two.decode(np.ones(HIDDEN, np.float32))  # the only slot is the other's
        await tenant.unload("a0", drain=True)
        again = await tenant.layers.Step(request)
        assert (again.outcome[0], again.hidden) == (layer_pb.ROW_OUTCOME_REPLAYED, first.hidden)


def step_of(server: Server, handle: int, **fields: Any) -> layer_pb.StepRequest:
    """The first decode of a sequence."""
    return layer_pb.StepRequest(
        server_epoch=server.runtime.table.server_epoch,
        sequence=[handle],
        kind=[layer_pb.ROW_KIND_DECODE],
        step=[1],
        position=[0],
        query_start_loc=[0, 1],
        hidden=wire.encode(np.ones((1, HIDDEN), np.float32)),
        **fields,
    )


async def test_opening_again_with_the_same_token(make_server: MakeServer) -> None:
    async with serving(make_server) as (server, tenant):
        fleet = Fleet(server.config, 2)
        for i in range(2):
            await tenant.load(fleet.upload(f"a{i}", i))
        token = os.urandom(16)
        first, content_hash = await tenant.open("a0", 2, open_token=token)
        again, same_hash = await tenant.open("a0", 2, open_token=token)
        assert [one.handle for one in again] == [one.handle for one in first] and same_hash == content_hash
        for other in ("a1", ""):
            with refused("INVALID_ARGUMENT", "INVALID_REQUEST"):
                await tenant.open(other, 2, open_token=token)
        assert (await tenant.listed()).adapters[0].sequences == 2


async def test_a_lease_that_ran_out_frees_the_adapter(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltaline_server.app.LEASE_TICK_S", 0.05)
    async with serving(make_server) as (server, tenant):
        fleet = Fleet(server.config, 1)
        await tenant.load(fleet.upload("a", 0))
        await tenant.open("a", 3, lease_ms=100)
        await until(lambda: not server.runtime.table.adapters.num_bound)
        assert await tenant.unload("a") == 0
        assert (await tenant.listed()).used_bytes == 0


class Gate:
    """Where something slow waits. came: it does. It is let go in the end whatever happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.came, self.opened = threading.Event(), threading.Event()

    def stand_before(self, owner: type, method: str) -> None:
        """Let all calls of a method wait."""
        act = getattr(owner, method)

        def slowly(*arguments: Any) -> Any:
            self.came.set()
            self.opened.wait(100)
            return act(*arguments)

        self._monkeypatch.setattr(owner, method, slowly)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


async def test_no_step_waits_for_a_copy_to_the_device(make_server: MakeServer, gate: Gate) -> None:
    async with serving(make_server, adapter_slots=2) as (server, tenant):
        fleet = Fleet(server.config, 2)
        for i in range(2):
            await tenant.load(fleet.upload(f"a{i}", i))
        opened = [await tenant.open(name) for name in ("", "a0", "a1")]
        (base, quick, slow), hashes = [pair[0] for pair, _ in opened], [content_hash for _, content_hash in opened]
        programs = draw(3, seed=20, num_steps=6)
        first = await run_together(tenant.client, [quick], [Program(programs[1].steps[:1])])
        gate.stand_before(AdapterStore, "write")
        waits = asyncio.create_task(run_together(tenant.client, [slow], [programs[2]]))
        others = [programs[0], Program(programs[1].steps[1:])]
        outputs = await run_together(tenant.client, [base, quick], others)
        assert not waits.done()
        assert server.runtime.scheduler.adapter_wait.num_waiting == 1
        gate.opened.set()
        check(fleet, programs, [outputs[0], first[0] + outputs[1], (await waits)[0]], hashes)


async def test_no_step_waits_for_a_load_from_files(make_server: MakeServer, gate: Gate) -> None:
    async with serving(make_server) as (server, tenant):
        fleet = Fleet(server.config, 2)
        await tenant.load(fleet.upload("a0", 0))
        gate.stand_before(AdapterPlan, "load")
        loads = asyncio.create_task(tenant.load(fleet.upload("a1", 1)))
        assert await asyncio.to_thread(gate.came.wait, 100)
        opened = [await tenant.open(name) for name in ("", "a0")]
        programs = draw(2, seed=30)
        outputs = await run_together(tenant.client, [pair[0] for pair, _ in opened], programs)
        check(fleet, programs, outputs, [content_hash for _, content_hash in opened])
        assert not loads.done()
        gate.opened.set()
        assert (await loads).adapter.name == "a1"


async def test_a_server_stops_while_an_adapter_is_on_its_way(make_server: MakeServer, gate: Gate) -> None:
    async with serving(make_server) as (server, tenant):
        fleet = Fleet(server.config, 1)
        await tenant.load(fleet.upload("a", 0))
        (one,), _ = await tenant.open("a")
        gate.stand_before(AdapterStore, "write")
        waits = asyncio.ensure_future(tenant.layers.Step(step_of(server, one.handle)))
        await until(lambda: server.runtime.scheduler.adapter_wait.num_waiting)
        stopping = asyncio.create_task(server.stop())
        answer = await waits
        assert reason_of(answer.row_status[0].status) == "STOPPING"
        assert not stopping.done()  # it waits for the thread that copies
        gate.opened.set()
        await stopping
    assert not [thread for thread in threading.enumerate() if thread.name == "adapters"]


async def test_a_server_stops_while_adapters_are_read(make_server: MakeServer, gate: Gate) -> None:
    async with serving(make_server) as (server, tenant):
        fleet = Fleet(server.config, 2)
        assert server.runtime.adapters is not None
        gate.stand_before(AdapterPlan, "load")
        loads = [asyncio.create_task(tenant.load(fleet.upload(f"a{i}", i))) for i in range(2)]
        assert await asyncio.to_thread(gate.came.wait, 100)
        server.interrupt()
        server.interrupt()  # the second signal: nobody is waited for
        stopping = asyncio.create_task(server.stop())
        gone = await asyncio.gather(*loads, return_exceptions=True)
        assert all(isinstance(one, grpc.aio.AioRpcError) for one in gone)
        assert not stopping.done()  # the thread that reads is waited for
        gate.opened.set()
        await stopping
        assert server.runtime.adapters.registry.num_registered == 1


async def test_verifies_and_long_prompts_of_adapters_beside_others(make_server: MakeServer) -> None:
    async with serving(make_server, adapter_slots=3, chunk_tokens=64) as (server, tenant):
        fleet = Fleet(server.config, 3)
        for i in range(3):
            await tenant.load(fleet.upload(f"a{i}", i))
        opened = [await tenant.open(name) for name in ("a0", "a1", "a2", "", "a0")]
        sequences, hashes = [pair[0] for pair, _ in opened], [content_hash for _, content_hash in opened]
        programs = [Program.draw(70 + i, 6, HIDDEN, lengths=(150, 200, 333)) for i in range(5)]
        outputs = await asyncio.gather(
            *(run_together(tenant.client, [one], [program]) for one, program in zip(sequences, programs, strict=True))
        )
        check(fleet, programs, [output[0] for output in outputs], hashes)
        token = np.ones((1, HIDDEN), np.float32)
        await tenant.client.step([Row.decode(sequence, token) for sequence in sequences])


async def test_a_prompt_s_state_is_found_under_its_own_adapter(make_server: MakeServer) -> None:
    async with serving(make_server, snapshot_lines=8) as (server, tenant):
        client, fleet, made = tenant.client, Fleet(server.config, 2), dict[str | None, bytes]()
        await tenant.load(fleet.upload("a", 0))
        await tenant.load(fleet.upload("b", 1))
        prefix, hidden = Prefix.of_tokens(range(9), at=(5,)), np.ones((5, HIDDEN), np.float32)
        for name in ("a", None):
            async with await client.open(adapter=name) as sequence:
                await sequence.prefill(hidden)
                made[name] = (await sequence.snapshot(key=prefix.keys[0])).id
        for name in ("a", None, "b"):
            found = await client.snapshots.find(prefix, adapter=name)
            async with await client.open(adapter=name, prefix=prefix) as sequence:
                assert (sequence.match, found.snapshot_id) == (found, made.get(name))
                assert sequence.position == (5 if name in made else 0)
                assert sequence.adapter_hash == {"a": fleet.hashes[0], "b": fleet.hashes[1]}.get(name or "", b"")
        assert found.miss is PrefixMiss.OTHER_ADAPTER
        for call in (client.snapshots.find(prefix, adapter="c"), client.open(prefix=prefix, adapter="c")):
            with pytest.raises(AdapterUnknown):
                await call


async def test_a_stored_state_comes_back_under_its_adapter_s_content_whatever_the_name(make_server: MakeServer) -> None:
    tiers: dict[str, Any] = {"snapshot_lines": 1, "host_state_bytes": 1 << 20}
    async with serving(make_server, **tiers) as (server, tenant):
        client, fleet = tenant.client, Fleet(server.config, 2)
        await tenant.load(fleet.upload("a", 0))
        prefix, hidden = Prefix.of_tokens(range(9), at=(5,)), np.ones((5, HIDDEN), np.float32)
        async with await client.open(adapter="a") as sequence, await client.open() as other:
            await sequence.prefill(hidden)
            made = await sequence.snapshot(key=prefix.keys[0])
            expected = await sequence.decode(hidden[:1])
            host = server.runtime.tiers.host
            assert host is not None
            await until(lambda: host.find(made.id) is not None)
            await other.prefill(hidden)
            await (await other.snapshot(pin=True)).release()
        await tenant.unload("a")
        await tenant.load(fleet.upload("a", 1))
        with pytest.raises(AdapterUnknown, match="content"):
            await made.restore()
        await tenant.load(fleet.upload("b", 0))
        async with await client.open(adapter="b", prefix=prefix) as again:
            assert again.match is not None and (again.match.tier, again.position) == (Tier.HOST, 5)
            assert again.adapter_hash == fleet.hashes[0]
            assert (await again.decode(hidden[:1]) == expected).all()
        server.runtime.states.snapshots.check_integrity()
