"""Faults at named points of moves, and a sequence that lives through one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from enum import Enum
from random import Random
from typing import Any

import pytest
from rigs.moved_sequences import DECODE, PREFILL, VERIFY, Asked, Calls, Refused, Stepped
from rigs.until import until

from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.app import Server
from deltaline_server.errors import Reason, RequestError
from deltaline_server.moving.peers import Peer

LEASE_MS, PIECE_BYTES = 600_000, 500


class Point(Enum):
    """Where a move is when something fails."""

    BEFORE_ANY_BYTE = "before the export is read"
    MID_STREAM = "in the middle of the stream"
    ANSWER = "after the target opened, before its answer came"
    BEFORE_LET_GO = "after the answer, before it is let go of"
    AFTER_LET_GO = "after it was let go of, before the caller is answered"


class Kind(Enum):
    """What fails: the other side is silent, there is no room, or somebody made a mistake."""

    SILENCE = "silence"
    NO_ROOM = "no room"
    MISTAKE = "mistake"

    def error(self) -> Exception:
        """What is raised for it."""
        if self is Kind.SILENCE:
            return TimeoutError("injected")
        return RequestError(Reason.NO_SNAPSHOT_LINES, "injected") if self is Kind.NO_ROOM else RuntimeError("injected")


class Clock:
    """The clock of a server, which a test may set forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Faults:
    """Stands in the way of a source's moves. num_struck: faults so far; is_behind_pages: whether pages had gone when
    the sequence stood still."""

    def __init__(self, source: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        passage = source.runtime.passage
        exchange = passage.existing_exchange()
        mover = source.runtime.mover
        self._pieces, self._let_go, self._open, self._move = exchange.pieces, passage.let_go, Peer.open, mover.move
        self._stored, self._is_frozen = passage.stored, False
        monkeypatch.setattr(passage, "stored", self._freeze)
        monkeypatch.setattr(exchange, "pieces", self._in_pieces)
        monkeypatch.setattr(passage, "let_go", self._before_let_go)
        monkeypatch.setattr(mover, "move", self._behind_move)
        monkeypatch.setattr(Peer, "open", lambda peer, *asked: self._behind_open(peer, *asked))
        self._point: Point | None = None
        self.num_struck, self.is_behind_pages = 0, False

    def arm(self, point: Point, kind: Kind, times: int, random: Random, in_rest: bool) -> None:
        """So often something fails there. in_rest: whether pages that go ahead are spared."""
        self._point, self._kind, self._left, self._random, self._in_rest = point, kind, times, random, in_rest
        self.num_struck, self._is_frozen, self.is_behind_pages = 0, False, False

    def _freeze(self, *arguments: Any, **options: Any) -> Any:
        self._is_frozen, self.is_behind_pages = True, options["ahead"] > 0
        return self._stored(*arguments, **options)

    def _strike(self, point: Point) -> None:
        if point is self._point and self._left:
            self._left -= 1
            self.num_struck += 1
            raise self._kind.error()

    async def _in_pieces(self, *arguments: Any, **options: Any) -> AsyncIterator[memoryview]:
        strikes = self._is_frozen or not self._in_rest
        if strikes:
            self._strike(Point.BEFORE_ANY_BYTE)
        num_before, num = self._random.randrange(1, 16), 0
        async for piece in self._pieces(*arguments, **(options | {"piece_bytes": PIECE_BYTES})):
            if num == num_before and strikes:
                self._strike(Point.MID_STREAM)
            num += 1
            yield piece

    async def _behind_open(self, peer: Peer, *asked: Any) -> Any:
        owner = await self._open(peer, *asked)
        try:
            self._strike(Point.ANSWER)
        except TimeoutError as error:
            raise RequestError(Reason.MOVE_FAILED, "injected") from error
        return owner

    def _before_let_go(self, *asked: Any) -> None:
        self._strike(Point.BEFORE_LET_GO)
        self._let_go(*asked)

    async def _behind_move(self, *asked: Any) -> Any:
        moved = await self._move(*asked)
        self._strike(Point.AFTER_LET_GO)
        return moved


async def sent(one: Stepped, asked: Asked) -> pb.StepResponse:
    """The answer to a step, sent on to wherever its sequence lives."""
    try:
        return await one.send(asked)
    except Refused as refused:
        assert refused.reason == "STATE_ELSEWHERE", refused.reason
        one.follow(refused.metadata)
        return await one.send(asked)


async def live_through(
    calls: Calls, source: Server, target: Server, clock: Clock, random: Random, address: str, first_tokens: int = 5
) -> tuple[bool, int]:
    """A sequence is moved while it is stepped, and whatever fails: it has one owner, and goes on as one that stays.

    clock: the target's; address: where the source reaches it; first_tokens: of its first step. Returns whether it was
    moved, and how many copies at the target wait for the end of their leases.
    """
    executed, num_steps = num_executed(source, target), 0
    one, twin = await calls.open(source.address, 2, lease_ms=LEASE_MS)
    kind, count = random.choice(((DECODE, 1), (VERIFY, 3)))
    last, first = Asked(2, first_tokens, kind, count), replace(one)
    commit = random.randrange(4) if last.kind == VERIFY else -1
    position = first_tokens + (last.count if commit < 0 else commit)
    following = [Asked(3, position, PREFILL, random.choice((1, 30)), commit)]
    following.append(Asked(4, position + following[0].count, DECODE, 1))
    for asked in (Asked(1, 0, PREFILL, first_tokens), last):
        for each in (one, twin):
            await each.send(asked)
    moving = asyncio.create_task(calls.move([replace(one)], address))
    for _ in range(random.randrange(40)):
        await asyncio.sleep(0)
    for asked in following:
        mine, its = await sent(one, asked), await twin.send(asked)
        assert list(mine.outcome) == list(its.outcome) == [pb.ROW_OUTCOME_EXECUTED]
        assert mine.hidden == its.hidden
    await asyncio.wait([moving])
    again = await sent(one, following[-1])
    assert list(again.outcome) == [pb.ROW_OUTCOME_REPLAYED] and again.hidden == mine.hidden
    num_steps += 2 * (2 + len(following))
    state, _ = await first.state()
    was_moved = one.address == target.address
    assert state == (pb.SEQUENCE_STATE_ELSEWHERE if was_moved else pb.SEQUENCE_STATE_OPEN)
    assert (await one.state())[0] == pb.SEQUENCE_STATE_OPEN
    assert moving.exception() is not None or bool(moving.result().moved) == was_moved
    assert num_executed(source, target) - executed == num_steps
    await one.close()
    await twin.close()
    assert source.runtime.table.num_open == 0
    table = target.runtime.table
    # What was coming when its call ended goes with that.
    await until(lambda: table.num_open == sum(len(handles) for _, handles in table.open_by_principal()))
    num_left = table.num_open
    expire(target, clock)
    for server in (source, target):
        server.runtime.states.snapshots.check_integrity()
        host = server.runtime.tiers.host
        assert host is not None and host.used_bytes == 0
    return was_moved, num_left


def expire(server: Server, clock: Clock) -> None:
    """Let leases end: nobody knows what is open there."""
    clock.ahead_s += LEASE_MS / 1000 + 1
    for _ in range(2):  # behind a stall it waits for one tick more
        server.runtime.table.reap()
    assert server.runtime.table.num_open == 0
    server.runtime.table.check_integrity()


def num_executed(*servers: Server) -> float:
    """Steps that servers have done."""
    name, labels = "deltaline_steps_total", {"outcome": "executed"}
    return sum(server.metrics.registry.get_sample_value(name, labels) or 0.0 for server in servers)
