"""Who has more calls at a time than another begins them at that one's pace, and nobody else waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deltaline_server.front.trust import fair_calls
from deltaline_server.front.trust.fair_calls import ACTIVE_S, CATCH_UP_S, LEAST_PER_S, FairCalls
from deltaline_server.principal import ANONYMOUS, Principal

FLOOD, VICTIM, THIRD = (Principal(number, name) for number, name in enumerate(("flood", "victim", "third"), 1))


class Rig:
    """Calls that enter in their order, and a clock. The ticks of the event loop are `pass_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fair_calls, "TICK_S", 3600.0)
        self.now_s = 100.0
        self.calls = FairCalls(lambda: self.now_s)
        self.tasks: dict[Principal | None, list[asyncio.Task[None]]] = {}

    async def enter(self, principal: Principal | None, count: int = 1) -> int:
        """Begin calls; return how many of the principal's have begun."""
        self.tasks.setdefault(principal, []).extend(
            asyncio.create_task(self.calls.enter(principal)) for _ in range(count)
        )
        return await self.num_begun(principal)

    async def num_begun(self, principal: Principal | None) -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return sum(task.done() and not task.cancelled() for task in self.tasks[principal])

    async def pass_s(self, seconds: float, ticks: int = 1) -> None:
        for _ in range(ticks):
            self.now_s += seconds / ticks
            self.calls.look()
        await asyncio.sleep(0)

    async def steps(self, principal: Principal, per_s: float, seconds: float) -> None:
        """Make calls one after the other, so many a second."""
        for _ in range(round(per_s * seconds)):
            await self.calls.enter(principal)
            await self.pass_s(1 / per_s)
            self.calls.leave(principal)

    async def end(self) -> None:
        for tasks in self.tasks.values():
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    made = Rig(monkeypatch)
    yield made
    await made.end()


async def test_who_is_alone_waits_for_nothing(rig: Rig) -> None:
    assert await rig.enter(FLOOD, 64) == 64
    assert await rig.enter(None, 64) == await rig.enter(ANONYMOUS, 64) == 64
    assert await rig.enter(Principal(4, "only", is_alone=True), 64) == 64
    assert rig.calls.num_held == 0


async def test_who_has_as_many_at_a_time_as_another_waits_for_nothing(rig: Rig) -> None:
    for _ in range(50):
        for principal in (FLOOD, VICTIM):
            assert await rig.enter(principal, 2) % 2 == 0
        await rig.pass_s(1e-3)
        for principal in (FLOOD, FLOOD, VICTIM, VICTIM):
            rig.calls.leave(principal)
    assert rig.calls.num_held == 0


async def test_a_flood_begins_at_the_least_pace_beside_who_does_little(rig: Rig) -> None:
    await rig.enter(VICTIM)
    begun = await rig.enter(FLOOD, 100)
    # As many at a time as the other has, and what it may catch up.
    assert begun == pytest.approx(1 + 1 + CATCH_UP_S * LEAST_PER_S, abs=1)
    await rig.pass_s(0.1, ticks=100)
    assert await rig.num_begun(FLOOD) - begun == pytest.approx(0.1 * LEAST_PER_S, abs=2)
    assert await rig.enter(VICTIM) == 2, "who has fewer waits for nothing"
    assert rig.calls.num_held == 100 - begun


async def test_a_flood_begins_as_many_calls_as_another_that_has_many(rig: Rig) -> None:
    per_s = 3 * LEAST_PER_S
    await rig.steps(VICTIM, per_s, 3 * ACTIVE_S)
    await rig.enter(FLOOD, 1000)
    begun = await rig.num_begun(FLOOD)
    await rig.steps(VICTIM, per_s, 0.5)
    assert await rig.num_begun(FLOOD) - begun == pytest.approx(0.5 * per_s, rel=0.05)


async def test_two_floods_help_each_other_to_nothing(rig: Rig) -> None:
    await rig.enter(VICTIM)
    begun = sum([await rig.enter(one, 100) for one in (FLOOD, THIRD)])
    await rig.pass_s(0.1, ticks=100)
    after = sum([await rig.num_begun(one) for one in (FLOOD, THIRD)])
    assert after - begun == pytest.approx(2 * 0.1 * LEAST_PER_S, abs=3)


async def test_all_begin_once_others_are_gone(rig: Rig) -> None:
    await rig.enter(VICTIM)
    assert await rig.enter(FLOOD, 100) < 100
    rig.calls.leave(VICTIM)
    await rig.pass_s(0.9 * ACTIVE_S)
    assert await rig.num_begun(FLOOD) < 100
    await rig.pass_s(0.2 * ACTIVE_S)
    assert await rig.num_begun(FLOOD) == 100


async def test_calls_that_wait_keep_their_order_and_may_be_given_up(rig: Rig) -> None:
    await rig.enter(VICTIM)
    begun = await rig.enter(FLOOD, 20)
    tasks = rig.tasks[FLOOD]
    assert [task.done() for task in tasks] == [True] * begun + [False] * (20 - begun)
    for task in tasks[begun : begun + 5]:
        task.cancel()
    await asyncio.sleep(0)
    # One whose turn has come, and which is cancelled before it runs, has not entered.
    rig.now_s += 1 / LEAST_PER_S
    rig.calls.look()
    tasks[begun + 5].cancel()
    await rig.pass_s(1 / LEAST_PER_S)
    assert await rig.num_begun(FLOOD) == begun + 1 and tasks[begun + 6].done()
    for _ in range(begun + 1):
        rig.calls.leave(FLOOD)
    for task in tasks[begun + 7 :]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await rig.pass_s(2 * ACTIVE_S)
    assert await rig.enter(VICTIM, 3) == 4, "nothing is left of the flood"
