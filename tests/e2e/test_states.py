"""Forks and snapshots end to end: by both clients and every way, and over a network that loses and repeats calls."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import pytest
from e2e.conftest import server_of
from rigs.hostile_proxy import HostileProxy
from rigs.linked import FAST, Driven, tokens
from rigs.prefill_step import prefill_step
from rigs.served import served
from rigs.until import until
from rigs.watched_states import WatchedStates

from deltaline.v1 import admin_service_pb2 as admin_pb
from deltaline.v1 import admin_service_pb2_grpc, layer_service_pb2_grpc, tensor_pb2
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_client import (
    AsyncClient,
    NoFreeLines,
    SequenceState,
    SnapshotState,
    SnapshotUnknown,
    Tier,
)
from deltaline_server.app import Server

NUM_CLIENTS = 6


def states_of(server: Server) -> WatchedStates:
    kept = server.runtime.states
    assert isinstance(kept, WatchedStates)
    return kept


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("way", ["grpc", "link", "front end"])
def test_both_clients_by_every_way(
    make_server: Callable[..., Server],
    driven: Driven,
    watched: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of front ends
    link = str(tmp_path / "run" / "link.sock") if way == "link" else "off"
    server, do = make_server(link=link, front_ends=int(way == "front end")), driven.do
    with served(server) as address:
        client = driven.make(f"link:{link}" if way == "link" else address, retry=FAST)
        info = do(client.info())
        assert info.serves_state and info.is_linked == (way == "link")
        sequence = do(client.open())
        do(sequence.prefill(tokens(5)))
        [snapshot] = do(client.snapshots.create([sequence], pin=True))
        assert (snapshot.position, snapshot.pinned) == (5, True)
        children = do(sequence.fork(3))
        restored = [*do(snapshot.restore(2)), do(client.open(snapshot=snapshot.id))]
        everyone = [sequence, *children, *restored]
        assert [one.position for one in everyone] == [5] * 7
        assert do(client.decode(everyone, tokens(7))).shape == (7, 64)
        assert [one.position for one in everyone] == [6] * 7
        assert [one.spans[0].step for one in do(client.describe(everyone))] == [2] + [1] * 6
        do(client.close(children))
        assert [one.id for one in do(client.snapshots.list())] == [snapshot.id]
        assert do(client.snapshots.release([snapshot])) == [SnapshotState.RELEASED]
        with pytest.raises(SnapshotUnknown):
            do(snapshot.restore())
        assert do(client.describe([sequence]))[0].state is SequenceState.OPEN
        assert server.runtime.table.num_open == 4
        do(client.disconnect())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("calls_each", [40, pytest.param(1000, marks=pytest.mark.sweep)])
async def test_calls_over_a_hostile_network_are_done_once(
    make_server: Callable[..., Server], watched: None, calls_each: int
) -> None:
    rng = np.random.default_rng(1)
    made, held = Counter[str](), Counter[str]()

    def fate() -> str:
        return str(rng.choice(["sent", "lost", "unanswered", "doubled", "late"], p=[0.6, 0.1, 0.1, 0.1, 0.1]))

    async def one_client(address: str, seed: int) -> None:
        draw = Random(seed)
        async with AsyncClient(address, retry=FAST, timeout=300.0) as client:
            sequences, snapshots = await client.open_many(2), list[Any]()
            for _ in range(calls_each):
                what = draw.choice(("fork", "create", "restore", "open", "renew", "release", "close"))
                snapshot = draw.choice(snapshots) if snapshots else None
                match what:
                    case "fork":
                        sequences += await draw.choice(sequences).fork(draw.choice((1, 2)))
                    case "create" if len(snapshots) < 4:
                        snapshots += await client.snapshots.create(draw.sample(sequences, 2))
                    case "restore" if snapshot is not None:
                        sequences += await snapshot.restore(draw.choice((1, 2)))
                    case "open" if snapshot is not None:
                        sequences.append(await client.open(snapshot=snapshot))
                    case "renew" if snapshot is not None:
                        assert await snapshot.renew(60.0) is SnapshotState.HELD
                    case "release" if snapshot is not None:
                        assert await client.snapshots.release([snapshot]) == [SnapshotState.RELEASED]
                        snapshots.remove(snapshot)
                    case "close" if len(sequences) > 6:
                        await client.close(sequences[2:])
                        del sequences[2:]
                        continue
                    case _:
                        continue
                made[what] += 1
            assert set(await client.describe(sequences)) and {one.id for one in snapshots} <= {
                one.id for one in await client.snapshots.list()
            }
            held["sequences"] += len(sequences)
            held["snapshots"] += len(snapshots)

    async with make_server(max_sequences=256, link="off") as server, HostileProxy(server.address, fate) as proxy:
        await asyncio.gather(*(one_client(proxy.address, seed) for seed in range(NUM_CLIENTS)))
        states, table = states_of(server), server.runtime.table
        done = {
            "fork": states.num_forks,
            "create": states.num_creates,
            "restore + open": states.num_restores,
            "renew": states.snapshots.num_renewals,
            "release": states.snapshots.num_releases,
        }
        asked = {what: made[what] for what in ("fork", "create", "renew", "release")}
        assert done == asked | {"restore + open": made["restore"] + made["open"]}
        assert min(done.values()) > 0 and all(proxy.fates.values()) and len(proxy.fates) == 5
        async with AsyncClient(server.address) as client:
            assert len(await client.snapshots.list()) == held["snapshots"]
        table.check_integrity()
        assert table.num_open == held["sequences"]


@pytest.mark.parametrize("device", ["cpu"])
async def test_a_fork_that_finds_no_room_opens_nothing_and_may_be_tried_again(
    make_server: Callable[..., Server], watched: None
) -> None:
    async with (
        make_server(max_sequences=4, link="off") as server,
        AsyncClient(server.address, retry=replace(FAST, max_attempts=1)) as hasty,
        AsyncClient(server.address, retry=FAST) as patient,
    ):
        [parent] = await hasty.open_many(1)
        others = await patient.open_many(2)
        with pytest.raises(NoFreeLines):
            await parent.fork(2)
        assert server.runtime.table.num_open == 3
        mine = await patient.open()
        forking = asyncio.create_task(others[0].fork(1))
        num_before = states_of(server).num_forks
        await until(lambda: states_of(server).num_forks > num_before)
        await mine.close()
        assert len(await forking) == 1


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("front_ends", [0, 1])
async def test_a_prefill_over_a_hostile_network_leaves_its_waypoints_once(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, front_ends: int
) -> None:
    """Replies are lost and calls repeated: every answer tells the same snapshots, and there are no others."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of front ends
    fates = Random(3)
    made: list[bytes] = []

    def fate() -> str:
        return fates.choice(("sent", "sent", "lost", "unanswered", "doubled", "late"))

    async def sent(call: Any, message: Any) -> Any:
        while True:
            try:
                return await call(message, timeout=2.0)
            except grpc.RpcError as error:
                assert isinstance(error, grpc.aio.AioRpcError)
                assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

    async with (
        make_server(max_sequences=64, link="off", front_ends=front_ends) as server,
        HostileProxy(server.address, fate) as proxy,
        grpc.aio.insecure_channel(proxy.address) as channel,
    ):
        layers = layer_service_pb2_grpc.LayerServiceStub(channel)
        opened = await sent(layers.OpenSequences, pb.OpenSequencesRequest(count=1, open_token=b"t" * 16))
        for number in range(3):
            hidden = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[150, 64])
            hidden.inline = tokens(150, number).tobytes()
            step = prefill_step(opened, hidden)
            step.step[:], step.position[:] = [1 + number], [150 * number]
            step.waypoints.add(row=0, tokens=[64, 128], at_end=True, pinned=True)
            replies = [await sent(layers.Step, step) for _ in range(3)]
            told = [[place.snapshot_id for place in reply.waypoints] for reply in replies]
            assert told == told[:1] * 3 and [len(id) for id in told[0]] == [16] * 3
            assert [place.position - 150 * number for place in replies[0].waypoints] == [64, 128, 150]
            made += told[0]
            step.waypoints[0].pinned = False
            [refused] = (await sent(layers.Step, step)).row_status
            assert "STEP_CONFLICT" in str(refused.status)
        async with AsyncClient(server.address, retry=FAST) as client:
            assert {one.id for one in await client.snapshots.list()} == set(made)
            restored = [await client.open(snapshot=id) for id in made]
            assert [one.position for one in restored] == [64, 128, 150, 214, 278, 300, 364, 428, 450]
        server.runtime.table.check_integrity()


@pytest.mark.parametrize("device", ["cpu"])
async def test_waypoints_that_are_none_are_refused_by_name(make_server: Callable[..., Server]) -> None:
    async with (
        make_server(link="off") as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        layers = layer_service_pb2_grpc.LayerServiceStub(channel)
        info = await admin_service_pb2_grpc.AdminServiceStub(channel).GetServerInfo(admin_pb.GetServerInfoRequest())
        assert info.waypoint_tokens == 64
        opened = await layers.OpenSequences(pb.OpenSequencesRequest(count=1))
        hidden = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[100, 64], inline=tokens(100).tobytes())
        step = prefill_step(opened, hidden)
        step.waypoints.add(row=0, tokens=[info.waypoint_tokens // 2])
        with pytest.raises(grpc.RpcError) as caught:
            await layers.Step(step)
        assert isinstance(caught.value, grpc.aio.AioRpcError)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "waypoints[0].tokens" in str(caught.value)
        step.waypoints[0].tokens[:] = [info.waypoint_tokens]
        assert len((await layers.Step(step)).waypoints) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_snapshot_outlives_its_server(
    driven: Driven, tmp_path: Path, device: str, each_small_model: dict[str, Any]
) -> None:
    """It gives way on the device, goes on from host memory, and after a restart from its file, bit by bit."""
    do = driven.do
    tiers = {"snapshot_lines": 1, "host_state_bytes": 8 << 20, "state_dir_bytes": 1 << 30}

    def make() -> Server:
        return server_of(each_small_model, tmp_path, device, state_dir=str(tmp_path / "states"), **tiers)

    def files() -> list[Path]:
        return list((tmp_path / "states").glob("*.state"))

    def goes_on(sequence: Any) -> list[Any]:
        return [do(sequence.decode(tokens(1, seed=1))), do(sequence.prefill(tokens(70, seed=2)))]

    with served(make()) as address:
        client = driven.make(address, retry=FAST)
        sequence, other = do(client.open()), do(client.open())
        do(sequence.prefill(tokens(37)))
        do(other.prefill(tokens(3)))
        [snapshot] = do(client.snapshots.create([sequence]))
        expected = goes_on(sequence)
        asyncio.run(until(lambda: len(files()) == 1))
        [newer] = do(client.snapshots.create([other], pin=True))
        by_id = {one.id: one for one in do(client.snapshots.list())}
        assert (by_id[snapshot.id].tier, by_id[newer.id].tier) == (Tier.HOST, Tier.DEVICE)
        do(client.snapshots.release([newer]))
        [child] = do(snapshot.restore())
        assert all((one == two).all() for one, two in zip(goes_on(child), expected, strict=True))
        do(client.disconnect())
    with served(make()) as address:
        client = driven.make(address, retry=FAST)
        [found] = do(client.snapshots.list())
        assert (found.id, found.position, found.tier) == (snapshot.id, 37, Tier.FILE)
        [child] = do(found.restore())
        assert all((one == two).all() for one, two in zip(goes_on(child), expected, strict=True))
        assert do(client.snapshots.release([found])) == [SnapshotState.RELEASED]
        asyncio.run(until(lambda: not files()))
        do(client.disconnect())
