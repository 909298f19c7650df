"""Sequences that are moved between servers while they are stepped: one owner at every instant, the same bit by bit."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from e2e.conftest import server_of
from e2e.test_state_files import HOST, folder_of
from rigs.adapter_cases import adapter_config, adapter_tensors, base_weights, modules
from rigs.layer_calls import reason_of, refused, status_of
from rigs.linked import FAST
from rigs.moved_sequences import DECODE, PREFILL, VERIFY, Asked, Calls, HeldPieces, Refused, Stepped, all_kinds
from rigs.small_models import GATED_DELTA_NET, HYBRID
from rigs.until import until
from safetensors.torch import save

from deltaline.v1 import layer_service_pb2 as pb
from deltaline_client import AsyncClient
from deltaline_server.app import Server
from deltaline_server.models.config import ModelConfig
from deltaline_server.snapshots.directory import StateDirectory


@asynccontextmanager
async def pair(
    tmp_path: Path, model: dict[str, Any] = GATED_DELTA_NET, device: str = "cpu", of_target: Any = None, **options: Any
) -> AsyncIterator[tuple[Server, Server]]:
    """Two servers, of which the first may move sequences to the second. of_target: options of the second alone."""
    options = {"link": "off", **HOST, **options}
    target = server_of(model, folder_of(tmp_path, "target"), device, **(options | (of_target or {})))
    async with target:
        peers = {"move_peers": target.address}
        async with server_of(model, folder_of(tmp_path, "source"), device, **(peers | options)) as source:
            yield source, target
            hosts = [server.runtime.tiers.host for server in (source, target)]
            # A move that ends with the test gives back what it has a moment later.
            await until(lambda: all(host is not None and host.used_bytes == 0 for host in hosts))
            for server in (source, target):
                server.runtime.states.snapshots.check_integrity()


def reasons(answer: Any) -> dict[int, str]:
    return {one.row: reason_of(one.status) for one in answer.row_status}


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_a_moved_sequence_goes_on_bit_by_bit(
    tmp_path: Path, device: str, each_small_model: dict[str, Any], options: dict[str, str]
) -> None:
    async with pair(tmp_path, each_small_model, device, **options) as (source, target), Calls() as calls:
        one, twin = await calls.open(source.address, 2, lease_ms=50_000)
        for each in (one, twin):
            await each.step(PREFILL, 37)
            last = await each.step(VERIFY, 4)
        answer = await calls.move([one], target.address)
        [moved], table = answer.moved, target.runtime.table
        assert not answer.row_status and (moved.row, moved.server) == (0, target.address)
        assert moved.server_epoch == table.server_epoch != source.runtime.table.server_epoch
        state, told = await one.state()
        assert state == pb.SEQUENCE_STATE_OPEN and 40_000 < told.lease_remaining_ms <= 50_000
        assert list(told.spans) == [pb.SpanProgress(step=2, position=37, pending_tokens=4)]
        assert await one.again() == last
        for each in (one, twin):
            await each.commit(2)
        assert await all_kinds(one) == await all_kinds(twin)
        assert (source.runtime.table.num_open, table.num_open) == (1, 1)


async def test_spans_that_are_uneven_move(tmp_path: Path) -> None:
    async with pair(tmp_path, HYBRID, spans="0:1,1:2") as (source, target), Calls() as calls:
        one, twin = await calls.open(source.address, 2)
        for each in (one, twin):
            await each.step(PREFILL, 40, span=1)
            await each.step(VERIFY, 3, span=0)
        await calls.move([one], target.address)
        assert one.address == target.address
        for each in (one, twin):
            await each.commit(3, span=0)
            await each.step(PREFILL, 37, span=0)
        for span in (0, 1):
            assert await all_kinds(one, span) == await all_kinds(twin, span)


async def test_steps_that_come_meanwhile_run_once_at_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (source, target), Calls() as calls:
        one, twin = await calls.open(source.address, 2)
        for each in (one, twin):
            await each.step(PREFILL, 5)
        held = HeldPieces(source, monkeypatch)
        old = Stepped(calls, one.address, one.epoch, one.handle)
        moving = asyncio.create_task(calls.move([one], target.address))
        await until(lambda: held.num_leaving)
        asked = [Asked(2, 5, DECODE, 1), Asked(3, 6, PREFILL, 70)]
        steps = [asyncio.create_task(old.send(each)) for each in asked]
        await until(lambda: source.runtime.scheduler.load().queued_rows == 2)
        expected = [(await twin.send(each)).hidden for each in asked]  # others are stepped all the while
        assert not any(step.done() for step in steps) and target.runtime.table.num_open == 0
        held.go.set()
        await moving
        for step in steps:
            with pytest.raises(Refused) as caught:
                await step
            assert caught.value.reason == "STATE_ELSEWHERE"
            told = caught.value.metadata
            assert {name: told[name] for name in ("server", "server_epoch", "sequence")} == {
                "server": target.address,
                "server_epoch": str(one.epoch),
                "sequence": str(one.handle),
            }
        old.follow(told)
        answers = [await old.send(each) for each in asked]
        assert [list(answer.outcome) for answer in answers] == [[pb.ROW_OUTCOME_EXECUTED]] * 2
        assert [answer.hidden for answer in answers] == expected
        table = source.runtime.table
        assert (table.num_open, source.runtime.scheduler.load().queued_rows) == (1, 0)


async def test_a_commit_that_comes_meanwhile_is_made_at_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (source, target), Calls() as calls:
        one, other = await calls.open(source.address, 2)
        for each in (one, other):
            await each.step(VERIFY, 4)
        held, old = HeldPieces(source, monkeypatch), replace(one, progress=dict(one.progress))
        moving = asyncio.create_task(calls.move([one], target.address))
        await until(lambda: held.num_leaving)
        committing = asyncio.create_task(old.commit(3))
        await other.commit(3)  # it waits for nobody else's
        assert not committing.done()
        held.go.set()
        await moving
        with pytest.raises(Refused) as caught:
            await committing
        assert caught.value.reason == "STATE_ELSEWHERE"
        old.follow(caught.value.metadata)
        await old.commit(3)
        assert await all_kinds(old) == await all_kinds(other)


async def test_a_lease_is_not_made_longer_of_what_is_leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path) as (source, target), Calls() as calls:
        one, other = await calls.open(source.address, 2, lease_ms=50_000)
        await one.step(PREFILL, 100)
        held = HeldPieces(source, monkeypatch)
        moving = asyncio.create_task(calls.move([one], target.address))
        await until(lambda: held.num_leaving)
        layer, asked = calls.layer(source.address), {"server_epoch": other.epoch, "lease_ms": 90_000}
        both = pb.RenewLeasesRequest(sequence=[one.handle, other.handle], **asked)
        renewing = asyncio.ensure_future(layer.RenewLeases(both))

        def lease_s(handle: int) -> float:
            [told] = source.runtime.table.describe(one.epoch, np.array([handle], dtype=np.uint64))
            return told.lease_remaining_s

        await until(lambda: lease_s(other.handle) > 60)  # it waits for nobody else
        assert lease_s(one.handle) < 60 and not renewing.done()
        held.go.set()
        assert not reasons(await moving)
        [moved] = (await renewing).moved
        assert moved.server == target.address


async def test_an_adapter_has_to_be_the_same_at_the_target(tmp_path: Path) -> None:
    shape = ModelConfig.from_mapping(GATED_DELTA_NET)
    tensors = adapter_tensors(base_weights(shape), modules(shape), rank=2)
    content: dict[str, Any] = {"config": json.dumps(adapter_config(r=2)).encode(), "tensors": save(tensors)}
    async with (
        pair(tmp_path, adapter_bytes=1 << 22) as (source, target),
        Calls() as calls,
        AsyncClient(source.address, retry=FAST) as here,
        AsyncClient(target.address, retry=FAST) as there,
    ):
        await here.adapters.load("a", **content)
        one, twin = await calls.open(source.address, 2, adapter="a")
        for each in (one, twin):
            await each.step(PREFILL, 9)
        assert reasons(await calls.move([one], target.address)) == {0: "STATE_MISMATCH"}
        await there.adapters.load("a", **content)
        assert reasons(await calls.move([one], target.address)) == {}
        assert (await one.state())[1].adapter == "a" and one.address == target.address
        assert await all_kinds(one) == await all_kinds(twin)


async def test_each_is_moved_by_itself_and_what_is_not_goes_on(tmp_path: Path) -> None:
    async with pair(tmp_path, of_target={"max_sequences": 3}) as (source, target), Calls() as calls:
        sequences = await calls.open(source.address, 6)
        for each in sequences:
            await each.step(PREFILL, 3)
        first, closed, *rest = sequences
        before = replace(first)
        await calls.move([first], target.address)
        await closed.close()
        unknown = replace(closed, handle=1 << 30)
        asked, request_id = [before, closed, unknown, *rest], b"i" * 16
        answer = await calls.move(asked, target.address, request_id)
        assert before == first and answer.moved[0].row == 0, "it is told where it went before"
        moved, statuses = {one.row for one in answer.moved[1:]}, reasons(answer)
        assert len(moved) == 2 and moved < {3, 4, 5, 6} and target.runtime.table.num_open == 3
        assert statuses == {1: "SEQUENCE_CLOSED", 2: "SEQUENCE_UNKNOWN"} | dict.fromkeys(
            {3, 4, 5, 6} - moved, "NO_FREE_LINES"
        )
        outputs = {tuple(await all_kinds(one)) for one in (first, *rest)}
        assert len(outputs) == 1


async def test_a_move_that_is_asked_for_again_is_made_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, target), Calls() as calls:
        one = (await calls.open(source.address))[0]
        await one.step(PREFILL, 3)
        copies, request_id = [replace(one) for _ in range(3)], b"i" * 16
        answers = await asyncio.gather(*(calls.move([each], target.address, request_id) for each in copies))
        assert answers[0] == answers[1] == answers[2] and copies[0] == copies[2]
        assert target.runtime.table.num_open == 1
        error = await refused(calls.move([one], "another:1", request_id))
        assert reason_of(status_of(error)) == "INVALID_REQUEST"


async def test_what_is_closed_meanwhile_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path) as (source, target), Calls() as calls:
        one = (await calls.open(source.address))[0]
        await one.step(PREFILL, 3)
        held = HeldPieces(source, monkeypatch)
        moving = asyncio.create_task(calls.move([one], target.address))
        await until(lambda: held.num_leaving)
        await one.close()
        held.go.set()
        assert reasons(await moving) == {0: "SEQUENCE_CLOSED"}
        assert (source.runtime.table.num_open, target.runtime.table.num_open) == (0, 0)


async def test_where_moves_can_not_be_recorded_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    folder: Any = {"state_dir": str(tmp_path / "states"), "state_dir_bytes": 1 << 20}
    async with (
        pair(tmp_path, of_target={"state_dir": None, "state_dir_bytes": 0}, **folder) as (source, target),
        Calls() as calls,
    ):
        one = (await calls.open(source.address))[0]
        await one.step(PREFILL, 3)
        with monkeypatch.context() as patch:
            patch.setattr(StateDirectory, "append_record", fail)
            error = await refused(calls.move([one], target.address))
        assert reason_of(status_of(error)) == "MOVE_FAILED" and target.runtime.table.num_open == 0
        await one.step(DECODE)
        assert reasons(await calls.move([one], target.address)) == {}


async def test_a_server_that_drains_gives_and_does_not_take(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, target), Calls() as calls:
        one, other = await calls.open(source.address, 2)
        source.drain(600.0)
        assert not (await calls.move([one], target.address)).row_status
        await one.step(DECODE)
        target.drain(600.0)
        assert reasons(await calls.move([other], target.address)) == {0: "DRAINING"}
        await other.step(DECODE)


def num_calls(server: Server) -> float:
    """Calls that came to a server."""
    return sum(
        sample.value
        for metric in server.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "grpc_server_started_total"
    )


async def refused_target(calls: Calls, sequence: Stepped, target: str, why: str) -> None:
    """A target is refused, and the sequence goes on."""
    error = await refused(calls.move([sequence], target))
    assert (reason_of(status_of(error)), error.code()) == ("MOVE_TARGET_REFUSED", grpc.StatusCode.FAILED_PRECONDITION)
    assert error.details() == f"target: {why}"
    await sequence.step(DECODE)


async def test_a_target_has_to_be_listed_and_another_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own, nobody = f"127.0.0.1:{port}", "127.0.0.1:1"
    async with (
        pair(tmp_path, move_peers=f"{own}, {nobody}") as (_, target),
        server_of(GATED_DELTA_NET, tmp_path, "cpu", port=port, move_peers=f"{own}, {nobody}", **HOST) as source,
        Calls() as calls,
    ):
        one, came = (await calls.open(source.address))[0], num_calls(target)
        await refused_target(calls, one, nobody, f"{nobody} can't be reached, or does not prove who it is")
        await refused_target(calls, one, own, "it is this server")
        for address in (target.address, "", "localhost"):
            await refused_target(calls, one, address, f"expected one of this server's --move-peers, got {address!r}")
        assert num_calls(target) == came


async def test_states_go_by_host_memory_alone(tmp_path: Path) -> None:
    async with server_of(GATED_DELTA_NET, tmp_path, "cpu", host_state_bytes=0) as source, Calls() as calls:
        [one] = await calls.open(source.address)
        error = await refused(calls.move([one], "127.0.0.1:1"))
        assert reason_of(status_of(error)) == "HOST_TIER_OFF"
        expected = "moving, saving and loading states need a server that is started with --host-state-bytes"
        assert error.details() == expected
