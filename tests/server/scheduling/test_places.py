"""What is no step and has its place among a sequence's steps: behind those in flight, before those that come later."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rigs.num_calls import num_calls
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, checksum, outputs, reason, refuses, turns
from rigs.seeds import seeds

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import ANONYMOUS
from deltaline_server.scheduling.tick import TICK_S
from deltaline_server.step import StepResult
from deltaline_server.tables.open_tokens import Opened


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


def tells(told: list[int], number: int) -> Callable[[set[int]], None]:
    return lambda dropped: told.append(number)


async def test_places_that_wait_cost_the_next_one_nothing() -> None:
    async def calls_beside(num_places: int) -> int:
        rig = Rig(eager=False)
        handles = rig.open(8)
        steps = [decode(rig, handle, 1) for handle in handles]
        await turns()
        slots, told = rig.slots(*handles), list[int]()
        for number in range(num_places):
            rig.scheduler.in_order(slots, tells(told, number))
        calls = num_calls(lambda: rig.scheduler.in_order(slots, tells(told, num_places)))
        assert not told
        await finished(rig, *steps)
        assert told == [*range(num_places + 1)]
        return calls

    assert await calls_beside(400) == await calls_beside(4)


# -- forks of sequences whose steps were refused, or whose slot another had before -----------------------------------

CHUNKS = pytest.mark.parametrize("chunks", [4, 5, 6, 7, 8])


def long_prefill(rig: Rig, handle: int, chunks: int) -> None:
    rig.submit(rig.request((handle, PREFILL, 1, 0, -1, [0.0] * 64 * chunks)))


def create(rig: Rig, *handles: int) -> asyncio.Future[Any]:
    named = np.array(handles, dtype=np.uint64)
    states, epoch = rig.states, rig.table.server_epoch
    return asyncio.ensure_future(states.create(epoch, named, ANONYMOUS, lease_s=None, is_pinned=False))


def fork(rig: Rig, *handles: int) -> asyncio.Future[Opened]:
    named = np.array(handles, dtype=np.uint64)
    return asyncio.ensure_future(rig.states.fork(rig.table.server_epoch, named, 1, ANONYMOUS, lease_s=None))


async def child_of(rig: Rig, forked: asyncio.Future[Opened], position: int) -> None:
    """Run until there is a child; it has to be at a position, with the state of that."""
    for _ in range(40):
        await turns()
        if not forked.done() and rig.engine.waiting:
            rig.engine.run()
    child = int((await asyncio.wait_for(forked, 10)).handles[0])
    [told] = rig.table.describe(rig.table.server_epoch, np.array([child], dtype=np.uint64))
    assert told.spans[0].position == position
    [result] = await finished(rig, rig.submit(rig.request((child, DECODE, 1, position, -1, [7.0]))))
    assert outputs(result) == [checksum([float(step) for step in range(1, position + 1)] + [7.0])]


@CHUNKS
async def test_steps_behind_a_fork_wait_where_a_step_before_an_older_place_was_refused(chunks: int) -> None:
    rig = Rig(eager=False, snapshot_lines=8)
    one, other = rig.open(2)
    long_prefill(rig, other, chunks)
    overdue = [decode(rig, one, step, deadline_s=rig.now + 1) for step in (1, 2, 3, 4, 5)]
    both = create(rig, one, other)
    await turns()
    rig.now += 2
    rig.engine.run()
    await turns()
    rig.scheduler.settle()
    num_run = int(rig.table.ledger.tail.step[0, rig.slots(one)[0]])
    assert num_run < 5
    forked = fork(rig, one)
    await turns()
    later = [decode(rig, one, step) for step in range(num_run + 1, num_run + 5)]
    await child_of(rig, forked, num_run)
    with refuses(Reason.PREDECESSOR_REFUSED):
        await both
    await finished(rig, *overdue, *later)


@CHUNKS
async def test_a_place_of_who_had_the_slot_before_is_not_the_next_one_s(chunks: int) -> None:
    rig = Rig(eager=False, snapshot_lines=8)
    before, other = rig.open(2)
    for step in (1, 2, 3, 4, 5, 6):
        done = decode(rig, before, step)
        await turns()
        rig.engine.run()
        await done
    rig.scheduler.settle()
    long_prefill(rig, other, chunks)
    both = create(rig, before, other)
    await turns()
    rig.close(before)
    (after,) = rig.open(1)
    assert rig.slots(after) == rig.slots(before)
    first = decode(rig, after, 1)
    await turns()
    forked = fork(rig, after)
    await turns()
    later = [decode(rig, after, step) for step in (2, 3, 4, 5)]
    await child_of(rig, forked, 1)
    with refuses(Reason.SEQUENCE_CLOSED):
        await both
    await finished(rig, first, *later)


async def test_a_fork_is_told_of_a_refusal_with_nothing_in_flight() -> None:
    rig = Rig(eager=False, spans=2, snapshot_lines=8)
    one, other = rig.open(2)
    for span in (0, 1):
        done = rig.submit(rig.request((one, VERIFY, 1, 0, -1, [1.0, 2.0, 3.0]), span=span))
        await turns()
        rig.engine.run()
        await done
    rig.scheduler.settle()
    decode(rig, other, 1)
    first = fork(rig, one, other)
    await turns()
    conflicting = rig.submit(rig.request((one, DECODE, 2, 2, 2, [9.0]), span=1))
    await turns()
    second = fork(rig, one)
    await turns()
    rig.table.commit(
        rig.table.server_epoch, 0, np.array([one], dtype=np.uint64), np.array([1]), np.array([1], np.int32)
    )
    rig.engine.run()
    assert reason(await asyncio.wait_for(conflicting, 10)) == Reason.COMMIT_CONFLICT
    for waits in (first, second):
        with pytest.raises(RequestError):
            await asyncio.wait_for(waits, 10)


async def test_a_sequence_that_ends_behind_a_place_that_is_kept_is_told_at_once() -> None:
    rig = Rig(snapshot_lines=8)
    one, other = rig.open(2)
    kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    rig.scheduler.in_order(rig.slots(one, other), lambda dropped: kept)
    made = create(rig, one)
    await turns()
    rig.close(one)
    with refuses(Reason.SEQUENCE_CLOSED):
        await asyncio.wait_for(made, 10)
    behind = decode(rig, other, 1)
    await turns()
    assert not behind.done()
    kept.set_result(None)
    await finished(rig, behind)


async def test_a_deadline_passes_behind_a_place_that_is_kept_while_the_device_has_nothing_to_do() -> None:
    num_looks = 0

    def clock() -> float:
        nonlocal num_looks
        num_looks += 1
        return rig.now

    rig = Rig(clock=clock)
    (one,) = rig.open()
    kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    rig.scheduler.in_order(rig.slots(one), lambda dropped: kept)
    patient, late, behind = (decode(rig, one, 1 + i, deadline_s=rig.now + s) for i, s in enumerate((100, 1, 100)))
    rig.now += 2
    results = await asyncio.wait_for(asyncio.gather(late, behind), 10)
    assert [reason(one) for one in results] == [Reason.QUEUE_DEADLINE, Reason.PREDECESSOR_REFUSED]
    assert not patient.done() and not rig.engine.batches
    again = decode(rig, one, 2)
    kept.set_result(None)
    assert [outputs(one) for one in await finished(rig, patient, again)] == [[1.0], [checksum([1, 2])]]
    looks_before = num_looks
    await asyncio.sleep(5 * TICK_S)
    assert num_looks <= looks_before + 1, "it ticks on with nothing to look after"


class Taken:
    """A place over sequences: their last steps then, and their steps that were in flight; and what was told of it."""

    def __init__(self, rig: Rig, handles: list[int], steps: dict[int, list[asyncio.Future[StepResult]]]) -> None:
        self.rig, self.handles, self.slots = rig, handles, rig.slots(*handles)
        self.last = rig.table.ledger.tail.step[:, self.slots].copy()
        self.before = [[one for one in steps[handle] if not one.done()] for handle in handles]
        self.was_dropped: dict[int, bool] = {}
        self.num_told = 0
        rig.scheduler.in_order(self.slots, self.told)

    def told(self, dropped: set[int]) -> None:
        self.num_told += 1
        is_held = self.rig.table.handles(self.slots) == np.array(self.handles, dtype=np.uint64)
        done = self.rig.table.ledger.done.step[:, self.slots]
        for i in np.flatnonzero(is_held).tolist():
            self.was_dropped[i] = int(self.slots[i]) in dropped
            if self.was_dropped[i]:
                assert (done[:, i] <= self.last[:, i]).all()
            else:
                assert done[:, i].tolist() == self.last[:, i].tolist()

    def check(self) -> None:
        """All is over: it was told once, and of the refusals before it alone."""
        assert self.num_told == 1
        for i, was_dropped in self.was_dropped.items():
            assert was_dropped == any(reason(one.result()) is not None for one in self.before[i])


@pytest.mark.parametrize("seed", seeds(40))
async def test_places_among_refused_steps_and_sequences_that_come_and_go(seed: int) -> None:
    draw, rig = random.Random(seed), Rig(eager=False, spans=2, slots=6, queue_rows=1000)
    steps: dict[int, list[asyncio.Future[StepResult]]] = {handle: [] for handle in rig.open(5)}
    everything, places = list[asyncio.Future[StepResult]](), list[Taken]()
    for _ in range(300):
        action, handle = draw.random(), draw.choice(list(steps))
        (slot,), span = rig.slots(handle), draw.randrange(2)
        tail = int(rig.table.ledger.tail.step[span, slot])
        if action < 0.45:
            if tail - rig.table.ledger.done.step[span, slot] < 8:
                deadline_s = rig.now + 1 if draw.random() < 0.2 else None
                steps[handle].append(decode(rig, handle, tail + 1, span=span, deadline_s=deadline_s))
                everything.append(steps[handle][-1])
        elif action < 0.6:
            places.append(Taken(rig, draw.sample(list(steps), draw.randint(1, min(4, len(steps)))), steps))
        elif action < 0.65:
            rig.close(handle)
            del steps[handle]
            steps |= {one: [] for one in (rig.open() if rig.table.num_open < 6 else ())}
            if len(steps) < 3:
                break
        elif action < 0.75:
            rig.now += 2
        elif rig.engine.waiting:
            rig.engine.run()
            await turns(draw.choice([0, 1, 10]))
    await finished(rig, *everything)
    for place in places:
        place.check()


async def test_of_many_places_few_are_told_of_in_a_turn() -> None:
    """Each may do half a millisecond of work: the event loop must not stall for all of them."""
    rig = Rig(eager=False)
    (handle,) = rig.open()
    reached, step = Reached(rig), decode(rig, handle, 1)
    for i in range(100):
        reached.take(str(i), handle)
    rig.engine.release()
    seen = [0]
    while len(reached.told) < 100:
        await asyncio.sleep(0)
        seen.append(len(reached.told))
        assert len(seen) < 1000, "places were forgotten"
    assert max(np.diff(seen)) <= 32 and [name for name, _, _ in reached.told] == [str(i) for i in range(100)]
    await finished(rig, step, decode(rig, handle, 2))
