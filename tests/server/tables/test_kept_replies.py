"""Kept replies: each is its own row's, within the budget; those of streamed prefills are given up first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from rigs.scheduler_rig import DECODE, PREFILL, Rig, checksum, outputs, reason, refuses

from deltaline_server.errors import Reason
from deltaline_server.runtime import MAX_STEPS_IN_FLIGHT
from deltaline_server.step import RowOutcome
from deltaline_server.tables.kept_replies import KEPT_STEPS, EarlierReplies, PrefillAnswer


async def test_a_sequence_whose_kept_reply_fills_the_budget_can_still_step() -> None:
    rig = Rig(reply_bytes=32)  # one row of two tokens, its request and its outputs
    (a,) = rig.open()
    await rig.step((a, PREFILL, 1, 0, -1, [1, 2]))
    assert outputs(await rig.step((a, PREFILL, 2, 2, -1, [3, 4]))) == [14, 30]
    assert outputs(await rig.step((a, PREFILL, 3, 4, -1, [5, 6]))) == [55, 91]
    assert rig.scheduler.load().reply_bytes == 32


async def test_a_reply_that_its_client_may_lack_is_not_given_up() -> None:
    rig = Rig(eager=False, reply_bytes=48)  # three replies to a decode
    (a,) = rig.open()
    first = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    await asyncio.sleep(0)
    second = rig.submit(rig.request((a, DECODE, 2, 1, -1, [2])))
    rig.engine.run()
    await first
    await asyncio.sleep(0)
    third = rig.request((a, DECODE, 3, 2, -1, [3]))
    rig.table.replies.limit_bytes = 32
    with refuses(Reason.REPLY_BYTES_EXHAUSTED):
        rig.submit(third)
    again = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1])))
    assert outputs(await again) == [1]
    rig.engine.run()
    assert outputs(await second) == [5]


async def test_a_step_whose_reply_can_not_be_kept_takes_nobodys() -> None:
    rig = Rig(reply_bytes=1000)
    a, b = rig.open(2)
    for step in range(1, 5):
        await rig.step((a, PREFILL, step, 3 * (step - 1), -1, [1.0] * 3))
    with refuses(Reason.REPLY_BYTES_EXHAUSTED):
        rig.submit(rig.request((b, PREFILL, 1, 0, -1, [1.0] * 200)))
    again = await rig.step((a, PREFILL, 2, 3, -1, [1.0] * 3))
    assert again.outcome.tolist() == [RowOutcome.REPLAYED]


async def test_a_step_that_is_refused_while_it_waits_gives_its_bytes_back() -> None:
    rig = Rig(eager=False, reply_bytes=5 * 16)  # five replies to a decode
    a, b = rig.open(2)
    running = rig.submit(rig.request((b, DECODE, 1, 0, -1, [1.0])))
    await asyncio.sleep(0)
    late = rig.submit(rig.request((a, DECODE, 1, 0, -1, [1.0]), deadline_s=rig.now + 1.0))
    behind = rig.submit(rig.request((a, PREFILL, 2, 1, -1, [1.0, 2.0])))
    assert rig.scheduler.load().reply_bytes == (1 + 1 + 2) * 16
    rig.now += 2.0
    rig.engine.release()
    assert reason(await late) is Reason.QUEUE_DEADLINE and reason(await behind) is Reason.PREDECESSOR_REFUSED
    assert outputs(await running) == [1]
    rig.scheduler.settle()
    assert rig.scheduler.load().reply_bytes == 16
    rig.close(a, b)
    assert rig.scheduler.load().reply_bytes == 0


async def test_rows_that_stay_behind_keep_their_own_replies() -> None:
    """They are copied out of a request of which most rows have gone on."""
    rig = Rig()
    handles = rig.open(5)
    rows = [(handle, PREFILL, 1, 0, -1, [float(i + 1)] * 2) for i, handle in enumerate(handles)]
    await rig.step(*rows)
    for i in (0, 1, 3):
        await rig.step((handles[i], DECODE, 2, 2, -1, [9.0]))
    again = await rig.step(rows[4], rows[2])
    assert again.outcome.tolist() == [RowOutcome.REPLAYED] * 2
    assert (outputs(again, 0), outputs(again, 1)) == ([5, 15], [3, 9])


# -- of streamed prefills ----------------------------------------------------------------------------------------------


async def test_replies_of_one_request_are_copied_once_most_of_it_is_superseded() -> None:
    rig = Rig()
    handles = rig.open(4)
    slots, _ = rig.table.lookup(rig.table.server_epoch, np.array(handles, dtype=np.uint64))
    first = await rig.step(*((handle, DECODE, 1, 0, -1, [float(handle % 7)]) for handle in handles))

    def shared() -> list[bool]:
        kept = [rig.table.replies.get(0, int(slot)) for slot in slots]
        return [reply is not None and np.shares_memory(reply.hidden, first.hidden) for reply in kept]

    assert shared() == [True] * 4
    await rig.step(*((handle, DECODE, 2, 1, -1, [1.0]) for handle in handles[:2]))
    assert shared() == [False, False, True, True]
    await rig.step((handles[2], DECODE, 2, 1, -1, [1.0]))
    assert shared() == [False] * 4
    again = await rig.step((handles[3], DECODE, 1, 0, -1, [float(handles[3] % 7)]))
    assert again.outcome.tolist() == [RowOutcome.REPLAYED] and outputs(again) == outputs(first, 3)


def chunk(handle: int, number: int) -> Any:
    """A step of a streamed prefill: three tokens, whose kept reply has 48 bytes."""
    return handle, PREFILL, number, 3 * (number - 1), -1, [float(number)] * 3


async def test_the_last_prefill_steps_are_replayed() -> None:
    assert KEPT_STEPS >= MAX_STEPS_IN_FLIGHT
    rig = Rig()
    (a,) = rig.open()
    first = [await rig.step(chunk(a, number)) for number in range(1, KEPT_STEPS + 2)]
    again = [await rig.step(chunk(a, number)) for number in range(1, KEPT_STEPS + 2)]
    assert reason(again[0]) is Reason.STEP_STALE
    for one, other in zip(first[1:], again[1:], strict=True):
        assert other.outcome.tolist() == [RowOutcome.REPLAYED]
        assert (outputs(one), one.position.tolist()) == (outputs(other), other.position.tolist())
    assert reason(await rig.step((*chunk(a, 5)[:5], [0.0] * 3))) is Reason.STEP_STALE


async def test_a_decode_ends_them_and_so_does_the_end_of_the_sequence() -> None:
    rig = Rig()
    a, b = rig.open(2)
    for number in (1, 2):
        await rig.step(chunk(a, number))
    await rig.step((a, DECODE, 3, 6, -1, [1.0]))
    assert rig.scheduler.load().reply_bytes == 16
    assert reason(await rig.step(chunk(a, 1))) is Reason.STEP_STALE
    await rig.step(chunk(b, 1))
    assert rig.scheduler.load().reply_bytes == 16 + 2 * 48  # the latest, and among those that are given up first
    rig.close(a, b)
    assert rig.scheduler.load().reply_bytes == 0


async def test_they_stay_within_the_budget_and_are_given_up_first() -> None:
    rig = Rig(reply_bytes=5 * 24)
    for _ in range(3):
        (a,) = rig.open()
        tokens: list[float] = []
        for number in range(1, 7):
            tokens += chunk(a, number)[5]
            assert outputs(await rig.step(chunk(a, number)))[-1] == checksum(tokens)
            assert rig.scheduler.load().reply_bytes <= 5 * 24
        assert (await rig.step(chunk(a, 6))).outcome.tolist() == [RowOutcome.REPLAYED]
        rig.close(a)


async def test_they_are_kept_as_long_as_there_is_room() -> None:
    rig = Rig(reply_bytes=10 * 48)
    (a,) = rig.open()
    for number in range(1, 7):
        await rig.step(chunk(a, number))
    again = [await rig.step(chunk(a, number)) for number in range(1, 7)]
    assert [one.outcome.tolist() for one in again] == [[RowOutcome.REPLAYED]] * 6


def test_the_longest_unused_are_given_up_first() -> None:
    replies = EarlierReplies(max_steps=8)
    hidden = np.zeros((1, 4), np.float32)
    request: Any = SimpleNamespace(hidden=hidden, form=SimpleNamespace(waypoints={}))
    for slot, step in ((0, 1), (1, 1), (0, 2)):
        replies.add(0, slot, PrefillAnswer(step, request, hidden, step), 1000)
    replies.give_up(1)
    assert replies.get(0, 0, 1) and replies.get(0, 0, 2) and not replies.get(0, 1, 1)
