"""The window of a stream: what fits in it, what waits, and for what."""

from __future__ import annotations

import asyncio

import pytest
from rigs.scheduler_rig import turns

from deltaline_server.front.flow_control import SharedBudget, StreamWindow
from deltaline_server.principal import ANONYMOUS, Principal

TEAM, OTHERS, ALONE = Principal(1, "team"), Principal(2, "others"), Principal(3, "alone", is_alone=True)


async def waits(window: StreamWindow, num_bytes: int) -> bool:
    """Ask for room; whether there is none."""
    asking = asyncio.create_task(window.acquire(num_bytes))
    await turns()
    is_waiting = not asking.done()
    asking.cancel()
    return is_waiting


@pytest.mark.parametrize(("num_bytes", "expected"), [(4, False), (5, True), (50, True)])
async def test_steps_fill_a_window_and_wait_beyond_it(num_bytes: int, expected: bool) -> None:
    window = StreamWindow(8, 10, SharedBudget(100), ANONYMOUS)
    await window.acquire(6)
    assert await waits(window, num_bytes) is expected


async def test_a_step_larger_than_the_window_is_taken_alone() -> None:
    window = StreamWindow(8, 10, SharedBudget(100), ANONYMOUS)
    assert not await waits(window, 50)
    assert await waits(window, 1)


async def test_who_waits_goes_on_when_a_step_is_over() -> None:
    window = StreamWindow(8, 10, SharedBudget(100), ANONYMOUS)
    await window.acquire(6)
    asking = asyncio.create_task(window.acquire(5))
    await turns()
    assert not asking.done()
    window.release(6)
    await asyncio.wait_for(asking, 60)


class Asked(SharedBudget):
    """A budget that counts how often it is asked for room."""

    num_asked = 0

    def has_room(self, principal: Principal, num_bytes: int) -> bool:
        self.num_asked += 1
        return super().has_room(principal, num_bytes)


async def streams(budget: SharedBudget, principal: Principal, *sizes: int) -> list[StreamWindow]:
    """Streams that hold a step each."""
    windows = [StreamWindow(2, 1000, budget, principal) for _ in sizes]
    for window, size in zip(windows, sizes, strict=True):
        await window.acquire(size)
    return windows


async def asking(windows: list[StreamWindow], num_bytes: int) -> list[asyncio.Task[None]]:
    """Tasks that ask for room, each after the one before."""
    tasks = [asyncio.create_task(window.acquire(num_bytes)) for window in windows]
    await turns()
    return tasks


def num_done(tasks: list[asyncio.Task[None]]) -> list[bool]:
    return [task.done() for task in tasks]


async def test_streams_that_wait_go_on_in_order_and_no_more_than_there_is_room_for() -> None:
    budget = Asked(100)
    [full] = await streams(budget, ANONYMOUS, 70)
    tasks = await asking(await streams(budget, ANONYMOUS, *[0] * 50), 35)
    assert not any(num_done(tasks))
    budget.num_asked = 0
    full.release(70)
    await turns()
    assert num_done(tasks) == [True, True, *[False] * 48]
    assert budget.num_asked == 3  # the third has no room, and nobody asks for the others


async def test_a_stream_whose_own_window_is_full_waits_for_that_alone() -> None:
    budget = Asked(100)
    stalled = await streams(budget, ANONYMOUS, *[0] * 50)
    for window in stalled:
        await window.acquire(0)
    tasks = await asking(stalled, 0)
    full, other = await streams(budget, ANONYMOUS, 90, 10)
    [behind] = await asking([other], 90)
    budget.num_asked = 0
    full.release(90)
    await asyncio.wait_for(behind, 60)
    assert not any(num_done(tasks)) and budget.num_asked == 1
    stalled[7].release(0)
    await turns()
    assert [at for at, is_done in enumerate(num_done(tasks)) if is_done] == [7]
    for window in stalled:
        window.release(0)
    await asyncio.wait_for(asyncio.gather(*tasks), 60)


async def test_a_principal_leaves_the_others_as_much_as_it_has() -> None:
    budget = SharedBudget(100)
    team = await streams(budget, TEAM, *[20] * 2)
    [task] = await asking(team[:1], 20)
    [other] = await streams(budget, OTHERS, 10)
    assert not task.done() and not await waits(other, 10) and await waits(other, 30)
    assert await waits(team[1], 1) and not await waits(team[1], 0)  # as one that is refused, or in shared memory
    team[1].release(20)
    await asyncio.wait_for(task, 60)


@pytest.mark.parametrize("principal", [ANONYMOUS, ALONE], ids=["anonymous", "alone"])
async def test_who_is_alone_may_have_all(principal: Principal) -> None:
    budget = SharedBudget(100)
    [window] = await streams(budget, principal, 50)
    assert not await waits(window, 50) and await waits(window, 1)


async def test_a_principal_beyond_its_share_holds_up_nobody_that_waits_behind_it() -> None:
    budget = SharedBudget(100)
    [full] = await streams(budget, ALONE, 60)
    team = await streams(budget, TEAM, 25)
    others = await streams(budget, OTHERS, 0)
    tasks = await asking([*team, *others], 20)
    assert num_done(tasks) == [False, False]
    full.release(10)
    await turns()
    assert num_done(tasks) == [False, True]
    team[0].release(25)  # it has nothing then
    await asyncio.wait_for(tasks[0], 60)


async def test_a_stream_counts_as_whose_it_is_now() -> None:
    budget = SharedBudget(100)
    first, second = await streams(budget, TEAM, 30, 0)
    assert await waits(second, 30)
    first.belong_to(OTHERS)
    assert not await waits(second, 30)
    first.belong_to(TEAM)
    assert await waits(second, 30)
    first.close()
    second.close()
    assert budget.has_room(ANONYMOUS, 100) and not budget.has_room(ANONYMOUS, 101)


async def test_a_stream_that_is_over_waits_no_more() -> None:
    budget = SharedBudget(100)
    full, gone, waiting = await streams(budget, ANONYMOUS, 100, 0, 0)
    tasks = await asking([gone, waiting], 100)
    tasks[0].cancel()
    await turns()
    gone.close()
    full.release(100)
    await asyncio.wait_for(tasks[1], 60)
