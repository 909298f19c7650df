"""Places that few have at a time: in turn by client, and none for long where others wait."""

from __future__ import annotations

import asyncio

import pytest
from rigs.until import until

from deltaline_server.front.port.slots import Slots

LONG_S = 3600.0


def ended() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def keep(slots: Slots, client: str, had: list[str], ends: asyncio.Event) -> None:
    async def work() -> None:
        had.append(client)
        await ends.wait()

    await slots.run(client, work)


async def test_clients_that_wait_take_turns() -> None:
    slots, had, ends = Slots(1, LONG_S, LONG_S), list[str](), asyncio.Event()
    first = asyncio.create_task(keep(slots, "first", had, ends))
    await until(lambda: had)
    others = [asyncio.create_task(keep(slots, client, had, ends)) for client in "aaabbc"]
    await asyncio.sleep(0)
    ends.set()
    await asyncio.gather(first, *others)
    assert "".join(had[1:]) == "abcaba"


async def test_a_place_is_kept_while_nobody_waits_and_given_up_when_one_does() -> None:
    slots, had, never = Slots(1, 0.01, LONG_S), list[str](), asyncio.Event()
    slow = asyncio.create_task(keep(slots, "slow", had, never))
    await until(lambda: had)
    await asyncio.sleep(0.05)
    assert not slow.done()
    other = asyncio.create_task(keep(slots, "other", had, never))
    with pytest.raises(TimeoutError):
        await slow
    await until(lambda: had == ["slow", "other"])
    await asyncio.sleep(0.05)
    assert not other.done()
    other.cancel()
    with pytest.raises(asyncio.CancelledError):  # not for its time
        await other


async def test_a_place_is_given_up_in_the_end() -> None:
    slots = Slots(1, 0.01, 0.02)
    with pytest.raises(TimeoutError):
        await keep(slots, "slow", [], asyncio.Event())
    await keep(slots, "anew", [], ended())


async def test_who_gives_up_waiting_leaves_its_turn_to_others() -> None:
    slots, had, ends = Slots(1, LONG_S, LONG_S), list[str](), asyncio.Event()
    waiting: list[asyncio.Task[None]] = []

    async def first() -> None:
        waiting[:] = [asyncio.create_task(keep(slots, client, had, ends)) for client in ("gone", "late", "last")]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])

    await slots.run("first", first)
    waiting[1].cancel()  # its turn has come, and it does not know yet
    await until(lambda: had)
    assert had == ["last"]
    ends.set()
    await waiting[2]
    async with asyncio.timeout(60):
        await keep(slots, "anew", [], ends)
