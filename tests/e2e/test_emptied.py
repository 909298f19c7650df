"""A drain with a target: every sequence goes on elsewhere, also when the server that let go of it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from e2e.conftest import server_of
from e2e.test_moves import pair
from e2e.test_state_files import HOST, folder_of
from rigs.layer_calls import reason_of, refused, status_of
from rigs.moved_sequences import DECODE, PREFILL, Calls, Refused, Stepped, all_kinds
from rigs.principals import entry, headers, write_principals
from rigs.small_models import GATED_DELTA_NET
from rigs.until import until

from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1.admin_service_pb2_grpc import AdminServiceStub
from deltaline_server.app import Server
from deltaline_server.errors import Reason, RequestError
from deltaline_server.moving import drain

LONG_S = 600.0


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "AGAIN_S", 0.01)


async def begin(server: Server, *targets: Server, timeout_s: float = LONG_S) -> None:
    for target in targets:
        await server.runtime.drain.check(target.address)
        server.runtime.drain.begin(timeout_s, target.address)


async def followed(call: Callable[[], Any], *sequences: Stepped) -> Any:
    """What a call gets, once the sequences are followed if they live elsewhere."""
    while True:
        try:
            return await call()
        except Refused as error:
            assert error.reason == "STATE_ELSEWHERE"
            for one in sequences:
                one.follow(error.metadata)


async def ended(server: Server) -> int:
    return await asyncio.wait_for(server.wait(), 60)


@pytest.mark.parametrize("num_targets", [1, 2])
async def test_all_sequences_go_on_elsewhere_while_they_are_stepped(tmp_path: Path, num_targets: int) -> None:
    async with (
        pair(tmp_path) as (_, first),
        server_of(GATED_DELTA_NET, folder_of(tmp_path, "second"), "cpu", link="off", **HOST) as second,
    ):
        targets = [first, second][:num_targets]
        peers = ",".join(target.address for target in targets)
        source = server_of(GATED_DELTA_NET, folder_of(tmp_path, "third"), "cpu", move_peers=peers, link="off", **HOST)
        async with source, Calls() as calls:
            twin, *moved = await calls.open(source.address, 41)
            expected = await all_kinds(twin)
            await twin.close()

            async def steps(one: Stepped) -> list[bytes]:
                outputs = [await followed(lambda: one.step(DECODE), one)]
                outputs.append(await followed(lambda: one.step(PREFILL, 70), one))
                outputs.append(await followed(lambda: one.step(pb.ROW_KIND_VERIFY, 3), one))
                return [*outputs, await followed(lambda: one.step(DECODE, accepted=2), one)]

            stepping = [asyncio.create_task(steps(one)) for one in moved]
            await begin(source, *targets)
            for outputs in await asyncio.gather(*stepping):
                for output, alone in zip(outputs, expected, strict=True):  # in batches of other sizes
                    near = np.frombuffer(output, np.float32), np.frombuffer(alone, np.float32)
                    np.testing.assert_allclose(*near, rtol=1e-4, atol=1e-5)
            await until(lambda: not source.runtime.table.num_open)
            for one in moved:  # those that were moved behind their last step
                await followed(lambda: one.step(DECODE), one)  # noqa: B023
            assert await ended(source) == 0
            assert source.runtime.mover.num_moved == 40
            shares = [target.runtime.table.num_open for target in targets]
            assert sum(shares) == 40 and min(shares) >= 8


async def test_sequences_of_all_principals_are_moved(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(headers("source")[0][1].removeprefix("Bearer "))
    entries = [entry("a", "step"), entry("b", "step"), entry("source", "peer")]
    principals = write_principals(tmp_path / "p.toml", *entries)
    async with (
        pair(tmp_path, principals=principals, move_token_file=str(token)) as (source, target),
        Calls(metadata=headers("a")) as of_a,
        Calls(metadata=headers("b")) as of_b,
    ):
        [one], [other] = await of_a.open(source.address), await of_b.open(source.address)
        await begin(source, target)
        await until(lambda: not source.runtime.table.num_open)
        for each in (one, other):
            with pytest.raises(Refused) as told:
                await each.step(DECODE)
            each.follow(told.value.metadata)
            await each.step(DECODE)
        one.handle, other.handle = other.handle, one.handle
        with pytest.raises(Refused) as unknown:
            await one.step(DECODE)
        assert unknown.value.reason == "SEQUENCE_UNKNOWN"
        assert await ended(source) == 0


async def test_what_has_no_room_yet_is_tried_again(tmp_path: Path) -> None:
    async with pair(tmp_path, of_target={"max_sequences": 2}) as (source, target), Calls() as calls:
        taken = await calls.open(target.address, 2)
        moved = await calls.open(source.address, 2)
        await begin(source, target)
        await until(lambda: source.runtime.mover.num_failed >= 2)
        for one in moved:
            await one.step(DECODE)
        for place, one in zip(taken, moved, strict=True):
            await place.close()
            await followed(lambda: one.step(DECODE), one)  # noqa: B023
        await until(lambda: not source.runtime.table.num_open)
        for one in moved:
            await followed(lambda: one.step(DECODE), one)  # noqa: B023
        assert await ended(source) == 0 and target.runtime.table.num_open == 2


async def test_the_time_of_the_drain_ends_it_whatever_is_left(tmp_path: Path) -> None:
    async with pair(tmp_path, of_target={"max_sequences": 1}) as (source, target), Calls() as calls:
        await calls.open(target.address)
        [one] = await calls.open(source.address)
        await begin(source, target, timeout_s=3.0)
        await one.step(DECODE)
        assert await ended(source) == 0
        assert source.runtime.table.num_open == 1
        await source.runtime.drain.close()


async def test_it_stays_until_who_has_a_moved_sequence_was_told(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, target), Calls() as calls:
        one, other = await calls.open(source.address, 2)
        await begin(source, target)
        await until(lambda: not source.runtime.table.num_open)
        for each in (one, other):
            assert source.runtime.table.moved.count_untold() and not source.runtime.drain.is_over()
            with pytest.raises(Refused):
                await each.step(DECODE)
        assert await ended(source) == 0


@pytest.mark.parametrize("target", ["127.0.0.1:1", "itself"])
async def test_a_drain_does_not_begin_with_a_target_that_is_refused(tmp_path: Path, target: str) -> None:
    async with (
        pair(tmp_path) as (source, _),
        Calls() as calls,
        grpc.aio.insecure_channel(source.address) as channel,
    ):
        target = source.address if target == "itself" else target
        stub: Any = AdminServiceStub(channel)
        error = await refused(stub.Drain(admin.DrainRequest(target=target)))
        assert reason_of(status_of(error)) == "MOVE_TARGET_REFUSED"
        assert not source.runtime.table.is_draining
        await calls.open(source.address)


async def test_the_next_server_of_the_name_tells_what_the_one_before_has_moved(tmp_path: Path) -> None:
    files: dict[str, Any] = {"state_dir": str(tmp_path / "files"), "state_dir_bytes": 1 << 22}
    async with pair(tmp_path) as (_, target), Calls() as calls:
        options: dict[str, Any] = {
            "link": "off",
            "move_peers": target.address,
            "advertise": "deltaline-0:50051",
            **files,
            **HOST,
        }
        async with server_of(GATED_DELTA_NET, folder_of(tmp_path, "before"), "cpu", **options) as before:
            one, stayed = await calls.open(before.address, 2)
            last = await one.step(PREFILL, 5)
            await before.runtime.drain.check(target.address)
            before.runtime.drain.begin(LONG_S, target.address)
            await until(lambda: not before.runtime.table.num_open)
        async with server_of(GATED_DELTA_NET, folder_of(tmp_path, "after"), "cpu", **options) as after:
            for each in (one, stayed):
                each.address = after.address
                with pytest.raises(Refused) as told:
                    await each.step(DECODE)
                assert told.value.reason == "STATE_ELSEWHERE"
                each.follow(told.value.metadata)
            assert await one.again() == last
            await one.step(DECODE)
            lost = Stepped(calls, after.address, one.epoch, 12345)
            with pytest.raises(Refused) as gone:
                await lost.step(DECODE)
            assert gone.value.reason == "STATE_LOST"


async def test_a_move_that_can_not_be_recorded_does_not_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, Any] = {"state_dir": str(tmp_path / "files"), "state_dir_bytes": 1 << 22}
    async with pair(tmp_path) as (_, target), Calls() as calls:
        options: dict[str, Any] = {"link": "off", "move_peers": target.address, **files, **HOST}
        async with server_of(GATED_DELTA_NET, folder_of(tmp_path, "full"), "cpu", **options) as source:
            [one] = await calls.open(source.address)
            records = source.runtime.mover.records

            async def add(*_: object) -> None:
                raise RequestError(Reason.MOVE_FAILED, "the move could not be recorded")

            monkeypatch.setattr(records, "add", add)
            answer = await calls.move([one], target.address)
            assert [reason_of(each.status) for each in answer.row_status] == ["MOVE_FAILED"]
            await one.step(DECODE)
            await until(lambda: not target.runtime.table.num_open)
            assert not len(source.runtime.table.moved)
