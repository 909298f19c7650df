"""Whatever fails while a sequence is moved, and wherever: one owner, no step twice, and nothing that nobody ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from e2e.conftest import server_of
from e2e.test_moves import reasons
from e2e.test_state_files import HOST, folder_of
from rigs.killing_proxy import KillingProxy
from rigs.move_faults import Clock, Faults, Kind, Point, live_through
from rigs.moved_sequences import PREFILL, Asked, Calls
from rigs.small_models import HYBRID

from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.app import Server
from deltaline_server.moving import ways
from deltaline_server.snapshots.sequences.coming import Coming

SWEEP = pytest.param(400, marks=[pytest.mark.sweep, pytest.mark.timeout(1800)])


class Two:
    """Two servers, of which the first may move sequences to the second, whose clock a test may set forward."""

    def __init__(self, source: Server, target: Server, clock: Clock) -> None:
        self.source, self.target, self.clock = source, target, clock


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    clock, options = Clock(), {"link": "off", "page_size": 16, **HOST}
    target = server_of(HYBRID, folder_of(tmp_path, "target"), "cpu", advertise="127.0.0.1", **options)
    async with Server(target.config, clock=clock) as target:
        options["move_peers"] = target.address
        async with server_of(HYBRID, folder_of(tmp_path, "source"), "cpu", **options) as source:
            yield Two(source, target, clock)


def is_moved(point: Point, kind: Kind, times: int, is_behind_pages: bool) -> bool:
    """Where a sequence has to live when so many faults are over. is_behind_pages: whether the first one struck when
    pages had gone ahead, which don't go again."""
    if point is Point.AFTER_LET_GO:
        return True
    if is_behind_pages and point in (Point.BEFORE_ANY_BYTE, Point.MID_STREAM):
        return False
    return kind is Kind.SILENCE and times == 1 and point is not Point.BEFORE_LET_GO


def num_left(point: Point, kind: Kind, times: int) -> int:
    """Copies that nobody was told of, and that the source, which knows of them, could not end."""
    if point is Point.BEFORE_LET_GO:
        return int(kind is not Kind.NO_ROOM)
    return int(point is Point.ANSWER and not is_moved(point, kind, times, False))


@pytest.mark.parametrize("rounds", [4, SWEEP])
@pytest.mark.parametrize("point", Point, ids=lambda point: str(point.name))
async def test_a_fault_leaves_one_owner(two: Two, monkeypatch: pytest.MonkeyPatch, point: Point, rounds: int) -> None:
    faults = Faults(two.source, monkeypatch)
    async with Calls() as calls:
        for number in range(rounds):
            random = Random(f"{point.name} {number}")
            kind, times = random.choice(list(Kind)), random.choice((1, 2))
            num_tokens, in_rest = random.choice((5, 50)), random.random() < 0.5
            faults.arm(point, kind, times, random, in_rest)
            address = two.target.address
            what = await live_through(calls, two.source, two.target, two.clock, random, address, num_tokens)
            is_behind = in_rest and faults.is_behind_pages
            expected = is_moved(point, kind, times, is_behind), num_left(point, kind, times)
            assert faults.num_struck >= 1 and what == expected, (kind, times, number)


@pytest.mark.parametrize("rounds", [8, SWEEP])
async def test_connections_that_break_leave_one_owner(two: Two, tmp_path: Path, rounds: int) -> None:
    random, num_moved = Random(rounds), 0
    lives = (
        random.randrange(1000, 35_000) for _ in range(10**6)
    )  # a move takes 20,000 bytes or so, pages ahead 17,000 more
    async with KillingProxy(two.target.address, lives) as proxy, Calls() as calls:
        options = {"link": "off", "page_size": 16, "move_peers": proxy.address, **HOST}
        async with server_of(HYBRID, tmp_path, "cpu", **options) as source:
            for _ in range(rounds):
                num_tokens = random.choice((5, 50))
                what = await live_through(calls, source, two.target, two.clock, random, proxy.address, num_tokens)
                num_moved += what[0]
                assert what[1] <= 1 - what[0], "one copy, however often it was asked for"
        assert proxy.kills > rounds // 2 and 0 < num_moved < rounds


async def test_steps_go_on_when_the_target_says_nothing(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    has_come, is_over = asyncio.Event(), asyncio.Event()

    async def never(*asked: object) -> None:
        has_come.set()
        await is_over.wait()

    monkeypatch.setattr(Coming, "open", never)
    monkeypatch.setattr(ways, "PAUSE_S", 0.5)
    async with Calls() as calls:
        [one] = await calls.open(two.source.address)
        await one.step(PREFILL, 5)
        moving = asyncio.create_task(calls.move([one], two.target.address))
        await has_come.wait()
        asked = Asked(2, 5, PREFILL, 3)
        assert list((await one.send(asked)).outcome) == [pb.ROW_OUTCOME_EXECUTED]
        assert reasons(await moving) == {0: "MOVE_FAILED"}
        is_over.set()
