"""The window of a stream: what fits in it, what waits, and for what."""

from __future__ import annotations

import asyncio

import pytest
from rigs.scheduler_rig import turns

from deltaline_server.front.flow_control import SharedBudget, StreamWindow


async def waits(window: StreamWindow, num_bytes: int) -> bool:
    """Ask for room; whether there is none."""
    asking = asyncio.create_task(window.acquire(num_bytes))
    await turns()
    is_waiting = not asking.done()
    asking.cancel()
    return is_waiting


@pytest.mark.parametrize(("num_bytes", "expected"), [(4, False), (5, True), (50, True)])
async def test_steps_fill_a_window_and_wait_beyond_it(num_bytes: int, expected: bool) -> None:
    window = StreamWindow(8, 10, SharedBudget(100))
    await window.acquire(6)
    assert await waits(window, num_bytes) is expected


async def test_a_step_larger_than_the_window_is_taken_alone() -> None:
    window = StreamWindow(8, 10, SharedBudget(100))
    assert not await waits(window, 50)
    assert await waits(window, 1)


async def test_who_waits_goes_on_when_a_step_is_over() -> None:
    window = StreamWindow(8, 10, SharedBudget(100))
    await window.acquire(6)
    asking = asyncio.create_task(window.acquire(5))
    await turns()
    assert not asking.done()
    window.release(6)
    await asyncio.wait_for(asking, 60)
