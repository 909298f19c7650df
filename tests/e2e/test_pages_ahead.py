"""Pages of a moved sequence go ahead while it is stepped: then it stands still for the rest, or goes on where it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.test_moves import pair, reasons
from rigs.moved_sequences import DECODE, PREFILL, VERIFY, Calls, HeldPieces, all_kinds
from rigs.small_models import HYBRID
from rigs.until import until

from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.errors import Reason, RequestError
from deltaline_server.moving import leaving
from deltaline_server.moving.peers import Peer
from deltaline_server.snapshots import exchange
from deltaline_server.snapshots.sequences.whole import WholeSequences
from deltaline_server.tables.moved import Owner

# Of the small model: keys and values of a page of 16 tokens.
PAGE_BYTES = 16 * 2 * 2 * 16 * 4
# Of the rest behind them: lines, a page that is not full, and a reply.
REST_BYTES = 36 << 10


@pytest.fixture(autouse=True)
def one_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "AHEAD_BYTES", 1)


def paged(tmp_path: Path, device: str = "cpu", **options: Any) -> Any:
    return pair(tmp_path, HYBRID, device, page_size=16, **options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_it_is_stepped_meanwhile_and_goes_on_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    async with paged(tmp_path, device) as (source, target), Calls() as calls:
        one, twin = await calls.open(source.address, 2)
        for each in (one, twin):
            await each.step(PREFILL, 100)
        held = HeldPieces(source, monkeypatch)
        moving = asyncio.create_task(calls.move([one], target.address))
        await until(lambda: held.num_leaving)
        for step in ((PREFILL, 43), (DECODE, 1), (VERIFY, 3)):
            assert await one.step(*step) == await twin.step(*step)
        held.go.set()
        assert not reasons(await moving) and one.address == target.address
        for each in (one, twin):
            await each.commit(2)
        assert await all_kinds(one) == await all_kinds(twin)
        mover, num_pages = source.runtime.mover, 144 // 16
        ahead = num_pages * (PAGE_BYTES + 4096)
        assert mover.bytes_ahead == ahead and 0 < mover.bytes_frozen < ahead and 0 < mover.frozen_s < 60
        assert held.num_leaving == num_pages + 1


async def test_what_is_closed_while_pages_go_ahead_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paged(tmp_path) as (source, target), Calls() as calls:
        [one] = await calls.open(source.address)
        await one.step(PREFILL, 100)
        held = HeldPieces(source, monkeypatch)
        moving = asyncio.create_task(calls.move([one], target.address))
        await until(lambda: held.num_leaving and target.runtime.table.num_open)
        await one.close()
        held.go.set()
        assert reasons(await moving) == {0: "SEQUENCE_CLOSED"}
        await until(lambda: not target.runtime.table.num_open)
        assert source.runtime.table.num_open == 0


async def test_a_lease_that_is_made_longer_meanwhile_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target was told of the one before: the sequence stays, and moves with the new one when it is asked again."""
    async with paged(tmp_path) as (source, target), Calls() as calls:
        [one] = await calls.open(source.address, lease_ms=50_000)
        await one.step(PREFILL, 100)
        held = HeldPieces(source, monkeypatch)
        moving = asyncio.create_task(calls.move([one], target.address))
        await until(lambda: held.num_leaving)
        renewal = pb.RenewLeasesRequest(server_epoch=one.epoch, sequence=[one.handle], lease_ms=90_000)
        await calls.layer(one.address).RenewLeases(renewal)
        held.go.set()
        answer = await moving
        assert reasons(answer) == {0: "MOVE_FAILED"} and "lease was made longer" in answer.row_status[0].status.message
        assert held.num_leaving == 6, "its pages: the rest does not go in vain, while the sequence stands still"
        await one.step(DECODE)
        await until(lambda: not target.runtime.table.num_open)
        assert not reasons(await calls.move([one], target.address))
        _, told = await one.state()
        assert told.lease_remaining_ms > 60_000


async def test_an_answer_that_is_lost_behind_pages_is_asked_for_by_the_rest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, num_opened = Peer.open, list[Any]()

    async def lost_once(peer: Peer, *asked: Any) -> Any:
        num_opened.append(await opens(peer, *asked))
        if len(num_opened) == 1:
            raise RequestError(Reason.MOVE_FAILED, "injected")
        return num_opened[-1]

    monkeypatch.setattr(Peer, "open", lost_once)
    async with paged(tmp_path) as (source, target), Calls() as calls:
        [one] = await calls.open(source.address)
        await one.step(PREFILL, 100)
        assert not reasons(await calls.move([one], target.address))
        assert num_opened[0] == num_opened[1] and target.runtime.table.num_open == 1
        assert source.runtime.mover.bytes_ahead == 6 * (PAGE_BYTES + 4096), "they did not go again"
        await one.step(DECODE)


@pytest.mark.parametrize("made", [paged, pair])
async def test_an_answer_that_is_lost_of_what_is_over_there_lets_nothing_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[..., Any]
) -> None:
    """As where its lease has run out before it was asked for again: the kept answer would tell of nothing."""
    opens, opened = Peer.open, list[Owner]()

    async def lost_once(peer: Peer, *asked: Any) -> Any:
        opened.append(await opens(peer, *asked))
        await calls.layer(target.address).CloseSequences(
            pb.CloseSequencesRequest(server_epoch=opened[-1].server_epoch, sequence=[opened[-1].handle])
        )
        raise RequestError(Reason.MOVE_FAILED, "injected")

    async with made(tmp_path) as (source, target), Calls() as calls:
        [one] = await calls.open(source.address)
        await one.step(PREFILL, 100)
        with monkeypatch.context() as patch:
            patch.setattr(Peer, "open", lost_once)
            assert reasons(await calls.move([one], target.address)) == {0: "MOVE_FAILED"}
        assert len(opened) == 1 and (source.runtime.table.num_open, target.runtime.table.num_open) == (1, 0)
        await one.step(DECODE)
        assert not reasons(await calls.move([one], target.address))


async def test_pages_that_take_too_long_end_the_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with paged(tmp_path) as (source, target), Calls() as calls:
        [one] = await calls.open(source.address)
        await one.step(PREFILL, 100)
        with monkeypatch.context() as patch:
            patch.setattr(leaving, "AHEAD_S", 0.0)
            assert reasons(await calls.move([one], target.address)) == {0: "MOVE_FAILED"}
        await one.step(DECODE)
        await until(lambda: not target.runtime.table.num_open)
        assert not reasons(await calls.move([one], target.address))


async def test_host_memory_that_has_room_for_one_file_takes_it_behind_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    land_pages = WholeSequences.land_pages

    async def slowly(*asked: Any) -> None:
        await asyncio.sleep(0.3)
        await land_pages(*asked)

    monkeypatch.setattr(WholeSequences, "land_pages", slowly)
    monkeypatch.setattr(exchange, "AHEAD_BYTES", 5 * PAGE_BYTES)
    async with paged(tmp_path, of_target={"host_state_bytes": REST_BYTES}) as (source, target), Calls() as calls:
        [one] = await calls.open(source.address)
        for _ in range(2):
            await one.step(PREFILL, 100)
        assert not reasons(await calls.move([one], target.address)) and one.address == target.address
        await one.step(DECODE)
