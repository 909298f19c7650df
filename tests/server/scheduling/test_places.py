"""What is no step and has its place among a sequence's steps: behind those in flight, before those that come later."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, Rig, checksum, outputs, reason, refuses, turns

from deltaline_server.errors import Reason
from deltaline_server.step import StepResult


def decode(rig: Rig, handle: int, step: int, **changes: Any) -> asyncio.Future[StepResult]:
    """Step number n is of token n, at the position before it."""
    return rig.submit(rig.request((handle, DECODE, step, step - 1, -1, [float(step)]), **changes))


class Reached:
    """Takes places; tells which were reached, and what was done by then."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.told = rig, list[tuple[str, list[int], set[int]]]()

    def take(self, name: str, *handles: int) -> None:
        slots = self.rig.slots(*handles)

        def on_reached(dropped: set[int]) -> None:
            done = self.rig.table.ledger.done.step[0, slots]
            self.told.append((name, done.tolist(), {slots.tolist().index(slot) for slot in dropped}))

        self.rig.scheduler.in_order(slots, on_reached)


async def finished(rig: Rig, *results: asyncio.Future[StepResult]) -> list[StepResult]:
    rig.engine.release()
    done = await asyncio.wait_for(asyncio.gather(*results), 10)
    rig.scheduler.settle()
    await turns()
    rig.table.check_integrity()
    return done


async def test_a_place_with_nothing_before_it_is_reached_at_once() -> None:
    rig = Rig()
    (handle,) = rig.open()
    reached = Reached(rig)
    reached.take("a", handle)
    assert reached.told == [("a", [0], set())]
    assert outputs(await decode(rig, handle, 1)) == [1.0]


async def test_steps_in_flight_come_before_and_later_ones_behind() -> None:
    rig = Rig(eager=False)
    first, second = rig.open(2)
    reached = Reached(rig)
    before = [decode(rig, handle, step) for step in (1, 2) for handle in (first, second)]
    reached.take("a", first, second)
    behind = [decode(rig, first, step) for step in (3, 4)]
    reached.take("b", first)
    last = decode(rig, first, 5)
    await turns()
    assert not reached.told
    while not all(one.done() for one in before):
        assert not reached.told and not any(one.done() for one in behind)
        rig.engine.run()
        await turns()
    results = await finished(rig, *behind, last)
    assert reached.told == [("a", [2, 2], set()), ("b", [4], set())]
    assert [outputs(one) for one in results] == [[checksum(range(1, step + 1))] for step in (3, 4, 5)]


async def test_rows_that_waited_together_run_together() -> None:
    rig = Rig(eager=False)
    first, second = rig.open(2)
    reached = Reached(rig)
    before = decode(rig, first, 1)
    reached.take("a", first, second)
    rows = [(first, DECODE, 2, 1, -1, [2.0]), (second, DECODE, 1, 0, -1, [2.0])]
    behind = rig.submit(rig.request(*rows))
    await finished(rig, before, behind)
    assert [batch.control.shape[1] - 1 for batch in rig.engine.batches] == [1, 2]


async def test_a_step_before_it_that_is_refused_is_told() -> None:
    rig = Rig(eager=False)
    first, second = rig.open(2)
    reached = Reached(rig)
    running = decode(rig, first, 1)
    dropped = decode(rig, first, 2, deadline_s=rig.now + 1)
    reached.take("a", first, second)
    behind = decode(rig, first, 3)
    rig.now += 2
    results = await finished(rig, running, dropped, behind)
    assert [reason(one) for one in results] == [None, Reason.QUEUE_DEADLINE, Reason.PREDECESSOR_REFUSED]
    assert reached.told == [("a", [1, 0], {0})]
    assert outputs(await decode(rig, first, 2)) == [checksum([1, 2])]


async def test_a_sequence_that_is_poisoned_before_it_is_told() -> None:
    rig = Rig(eager=False)
    (handle,) = rig.open()
    reached = Reached(rig)
    rig.engine.poison_token = 2.0
    steps = [decode(rig, handle, step) for step in (1, 2)]
    reached.take("a", handle)
    steps.append(decode(rig, handle, 3))
    results = await finished(rig, *steps)
    assert [reason(one) for one in results] == [None, Reason.STATE_POISONED, Reason.PREDECESSOR_REFUSED]
    assert reached.told == [("a", [1], {0})]


@pytest.mark.parametrize("running", [True, False])
async def test_a_sequence_that_ends_before_it_holds_up_nobody(running: bool) -> None:
    rig = Rig(eager=False)
    first, second = rig.open(2)
    reached = Reached(rig)
    waiting = [decode(rig, second, 1)] + [decode(rig, first, 1)] * running
    reached.take("a", first, second)
    rig.close(first)
    await finished(rig, *waiting)
    assert reached.told == [("a", [0, 1], set())]
    assert outputs(await decode(rig, second, 2)) == [checksum([1, 2])]


async def test_a_place_is_behind_all_spans() -> None:
    rig = Rig(eager=False, spans=2)
    (handle,) = rig.open()
    reached = Reached(rig)
    steps = [decode(rig, handle, 1, span=span) for span in (0, 1)]
    reached.take("a", handle)
    later = [decode(rig, handle, 2, span=span) for span in (0, 1)]
    rig.engine.run()
    await turns()
    assert not reached.told and len(rig.engine.batches) == 2
    await finished(rig, *steps, *later)
    assert reached.told == [("a", [1], set())]


async def test_a_long_prefill_is_over_first() -> None:
    rig = Rig(eager=False, chunk_tokens=64)
    (handle,) = rig.open()
    reached = Reached(rig)
    tokens = [float(i) for i in range(200)]
    prefill = rig.submit(rig.request((handle, PREFILL, 1, 0, -1, tokens)))
    rig.engine.run()
    await turns()
    reached.take("a", handle)
    rig.engine.run()
    await turns()
    assert not reached.told
    await finished(rig, prefill)
    assert reached.told == [("a", [1], set())]


async def test_what_waits_is_told_when_the_server_stops_and_none_is_taken_then() -> None:
    rig = Rig(eager=False)
    (handle,) = rig.open()
    reached = Reached(rig)
    steps = [decode(rig, handle, step) for step in (1, 2, 3)]
    reached.take("a", handle)
    rig.scheduler.stop()
    await finished(rig, *steps)
    assert reached.told and reached.told[0][0] == "a"
    with refuses(Reason.STOPPING):
        rig.scheduler.in_order(rig.slots(handle), lambda dropped: None)
    assert np.all(rig.table.ledger.done.step == rig.table.ledger.tail.step)
