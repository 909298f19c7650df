"""Rows with adapters: they wait for the device's slots in order, hold up nobody, and run under their own adapter."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, checksum, outputs, reason, turns
from rigs.seeds import seeds
from rigs.until import until

from deltaline_server.errors import Reason
from deltaline_server.scheduling.pending import RowState
from deltaline_server.scheduling.ready import ReadyQueue
from deltaline_server.step import StepResult
from deltaline_server.tables.adapter_places import GRACE_S
from deltaline_server.tables.adapter_registry import AdapterState
from deltaline_server.tables.sequence import SequenceState


def check(rig: Rig) -> None:
    """Nothing is lost, and no batch holds a slot."""
    rig.scheduler.settle()
    rig.table.check_integrity()
    assert rig.device.used == []
    assert not any(rig.adapter_slots.is_busy(number) for number in rig.registry.bound())


async def test_a_row_waits_for_its_adapter_and_the_others_for_nothing() -> None:
    rig = Rig(adapter_slots=2)
    rig.load("1", "2")
    (base,), (one,), (two,) = rig.open(), rig.open(adapter="1"), rig.open(adapter="2")
    waits = rig.submit(rig.request((one, PREFILL, 1, 0, -1, [5, 6])))
    for step in range(1, 4):  # one after the other, though the first copy never ends
        assert outputs(await rig.step((base, DECODE, step, step - 1, -1, [1]))) == [checksum([1] * step)]
    assert rig.engine.batches[-1].adapter_places is None
    also = rig.submit(rig.request((two, DECODE, 1, 0, -1, [3])))
    await turns()
    assert not waits.done() and not also.done() and rig.scheduler.adapter_wait.num_waiting == 2
    rig.device.finish(1)
    assert outputs(await also) == [checksum([3], 2)]
    assert not waits.done()
    rig.device.finish()
    assert outputs(await waits) == [checksum([5], 1), checksum([5, 6], 1)]
    assert rig.scheduler.adapter_wait.num_waiting == 0
    check(rig)


async def test_one_batch_mixes_adapters_base_rows_and_lengths() -> None:
    rig = Rig(adapter_slots=3, chunk_tokens=128)
    rig.load("1", "2", "3")
    handles = [*rig.open(2), *rig.open(2, "1"), *rig.open(2, "2"), *rig.open(1, "3")]
    adapters = [0, 0, 1, 1, 2, 2, 3]
    await warm(rig, handles[2:])
    order = [2, 0, 4, 1, 6, 3, 5]
    lengths = {0: 1, 1: 9, 2: 7, 3: 1, 4: 1, 5: 8, 6: 1}
    rows = []
    for i in order:
        step, position = (1, 0) if i < 2 else (2, 1)
        rows.append((handles[i], PREFILL, step, position, -1, [float(i)] * lengths[i]))
    result = await rig.step(*rows)
    slots = rig.engine.batches[-1].adapter_places
    assert slots is not None and slots.dtype == np.int32 and (slots == -1).sum() == 2
    for row, i in enumerate(order):
        before = [] if i < 2 else [9.0]
        expected = [checksum(before + [float(i)] * n, adapters[i]) for n in range(1, lengths[i] + 1)]
        assert outputs(result, row) == expected
    await rig.step((handles[3], VERIFY, 3, 2, -1, [5, 6, 7]))
    committed = await rig.step((handles[3], DECODE, 4, 4, 2, [8]))
    assert outputs(committed) == [checksum([9, 3, 5, 6, 8], 1)]
    check(rig)


async def warm(rig: Rig, handles: list[int]) -> None:
    """A first step of each sequence, with copies that end at once."""
    pending = rig.submit(rig.request(*((handle, DECODE, 1, 0, -1, [9.0]) for handle in handles)))
    while not pending.done():
        await turns()
        while rig.device.running:
            rig.device.finish()
    await pending


async def test_steps_of_a_sequence_stay_in_order_while_they_wait() -> None:
    rig = Rig(adapter_slots=1, eager=False)
    rig.load("1")
    (a,) = rig.open(adapter="1")
    pending = [
        rig.submit(rig.request((a, PREFILL, 1, 0, -1, [1] * 70))),
        rig.submit(rig.request((a, DECODE, 2, 70, -1, [2]))),
        rig.submit(rig.request((a, DECODE, 3, 71, -1, [3]))),
    ]
    await turns()
    assert rig.engine.batches == []
    rig.device.finish()
    await turns()
    rig.engine.release()
    results = await asyncio.gather(*pending)
    tokens = [1.0] * 70 + [2, 3]
    assert [outputs(result)[-1] for result in results] == [checksum(tokens[:n], 1) for n in (70, 71, 72)]
    check(rig)


async def test_a_repeated_step_is_answered_without_its_adapter() -> None:
    rig = Rig(adapter_slots=1)
    rig.load("1", "2")
    (one,), (two,) = rig.open(adapter="1"), rig.open(adapter="2")
    await warm(rig, [one])
    await warm(rig, [two])  # the only slot has the other adapter now
    result = await rig.step((one, DECODE, 1, 0, -1, [9]))
    assert outputs(result) == [checksum([9], 1)]
    assert rig.device.running == []


async def test_a_deadline_passes_while_the_device_has_nothing_else_to_do() -> None:
    rig = Rig(adapter_slots=1)
    rig.load("1", "2")
    (one,), (two,) = rig.open(adapter="1"), rig.open(adapter="2")
    late = rig.submit(rig.request((one, DECODE, 1, 0, -1, [9]), deadline_s=rig.now + 0.5))
    waits = rig.submit(rig.request((two, DECODE, 1, 0, -1, [8])))
    (base,) = rig.open()
    for step in range(1, 101):  # nor is it forgotten among those of many that are done
        await rig.step((base, DECODE, step, step - 1, -1, [1]), deadline_s=rig.now + 100)
    rig.now += 1
    assert reason(await late) is Reason.QUEUE_DEADLINE
    rig.device.finish()  # for nobody: the slot is given on once its grace is over
    rig.now += GRACE_S
    await until(lambda: rig.device.running)
    rig.device.finish()
    assert outputs(await waits) == [checksum([8], 2)]
    assert (await rig.step((one, DECODE, 1, 0, -1, [9]), deadline_s=rig.now - 1)).refusals
    check(rig)


async def test_an_adapter_that_nobody_waits_for_any_more_is_not_brought() -> None:
    rig = Rig(adapter_slots=1)
    rig.load("1", "2")
    (one,), (two,) = rig.open(adapter="1"), rig.open(adapter="2")
    waits = rig.submit(rig.request((one, DECODE, 1, 0, -1, [9])))
    late = rig.submit(rig.request((two, DECODE, 1, 0, -1, [8]), deadline_s=rig.now + 0.5))
    rig.now += 1
    assert reason(await late) is Reason.QUEUE_DEADLINE
    await until(lambda: rig.scheduler.adapter_wait.num_waiting == 1)
    rig.device.finish()
    await waits
    await asyncio.sleep(0.05)
    assert (rig.device.running, rig.adapter_slots.num_copies) == ([], 1)


async def test_a_row_whose_adapter_stays_after_all_goes_on() -> None:
    """Its place was for another, of which the row is overdue: nothing is copied that would wake it."""
    rig = Rig(adapter_slots=1, eager=False)
    rig.load("1", "2")
    (one,), (two,) = rig.open(adapter="1"), rig.open(adapter="2")
    first = rig.submit(rig.request((one, DECODE, 1, 0, -1, [9])))
    await turns()
    rig.device.finish()
    await until(lambda: rig.engine.waiting)
    late = rig.submit(rig.request((two, DECODE, 1, 0, -1, [8]), deadline_s=rig.now + 0.5))
    behind = rig.submit(rig.request((one, DECODE, 2, 1, -1, [7])))
    await turns()
    assert rig.scheduler.adapter_wait.num_waiting == 2
    rig.now += 1
    assert reason(await late) is Reason.QUEUE_DEADLINE
    await until(lambda: len(rig.engine.waiting) == 2)
    rig.engine.release()
    assert (outputs(await first), outputs(await behind)) == ([checksum([9], 1)], [checksum([9, 7], 1)])
    assert rig.adapter_slots.num_copies == 1
    check(rig)


async def test_a_copy_that_failed_is_tried_again() -> None:
    rig = Rig(adapter_slots=1)
    rig.load("1")
    (one,) = rig.open(adapter="1")
    waits = rig.submit(rig.request((one, DECODE, 1, 0, -1, [9])))
    for _ in range(2):
        await until(lambda: rig.device.running)
        rig.device.finish(is_copied=False)
        await turns()
        assert not waits.done() and not rig.device.running  # not at once: it may fail for a while
    await until(lambda: rig.device.running)
    rig.device.finish()
    assert outputs(await waits) == [checksum([9], 1)]


async def test_a_sequence_that_closes_while_it_waits_keeps_its_adapter_until_its_step_is_done() -> None:
    rig = Rig(adapter_slots=1)
    rig.load("1")
    (one,) = rig.open(adapter="1")
    waits = rig.submit(rig.request((one, DECODE, 1, 0, -1, [9])))
    assert rig.close(one) == [SequenceState.CLOSING]
    assert rig.registry.unload("1", drain=True) == 1
    rig.device.finish()
    assert outputs(await waits) == [checksum([9], 1)]
    rig.scheduler.settle()
    assert (rig.registry.num_registered, rig.table.adapters.num_bound, rig.device.slots) == (0, 0, [None])
    check(rig)


async def test_a_stopped_scheduler_refuses_rows_that_wait() -> None:
    rig = Rig(adapter_slots=1)
    rig.load("1")
    (one,) = rig.open(adapter="1")
    waits = rig.submit(rig.request((one, DECODE, 1, 0, -1, [9])))
    await turns()
    rig.scheduler.stop()
    assert reason(await waits) is Reason.STOPPING
    await rig.scheduler.drained()


async def copies_that_end(rig: Rig, draw: random.Random | None = None) -> None:
    """End each copy after a while, some of them badly; for ever."""
    while True:
        await asyncio.sleep(0.001)
        for _ in range(len(rig.device.running)):
            rig.device.finish(0, draw is None or draw.random() < 0.95)


@pytest.mark.parametrize("seed", seeds(4))
async def test_churn(seed: int) -> None:
    """Sequences of eight adapters and of none over three slots live random lives; adapters come and go, batches and
    copies fail: every output is that of the sequence's own adapter."""
    rig, draw = Rig(slots=24, spans=2, adapter_slots=3, long_rows=2), random.Random(seed)
    rig.load(*map(str, range(1, 9)))
    next_number, num_steps = 9, 0

    async def one() -> None:
        nonlocal num_steps
        names = [entry.name for entry in rig.registry.describe() if entry.state is not AdapterState.DRAINING]
        name = draw.choice([*names, ""])
        (handle,) = rig.open(adapter=name)
        adapter, state = int(name or 0), [list[float]() for _ in range(2)]
        for step in range(1, draw.randrange(2, 6)):
            for span in range(2):
                kind, tokens = PREFILL, [float(draw.randrange(9)) for _ in range(draw.choice([1, 3, 70, 150]))]
                row = (handle, kind, step, len(state[span]), -1, tokens)
                result = await rig.step(row, span=span)
                if result.refusals:
                    assert reason(result) is Reason.STATE_POISONED and draw_failed
                    rig.close(handle)
                    return
                expected = [checksum(state[span] + tokens[: n + 1], adapter) for n in range(len(tokens))]
                assert outputs(result) == expected
                state[span] += tokens
                num_steps += 1
        rig.close(handle)

    async def worker() -> None:
        nonlocal next_number
        for _ in range(12):
            await one()
            if draw.random() < 0.2:
                rig.load(str(next_number))
                next_number += 1
            if draw.random() < 0.2:
                names = [entry.name for entry in rig.registry.describe() if entry.state is not AdapterState.DRAINING]
                if names:
                    rig.registry.unload(draw.choice(names), drain=True)
            if draw.random() < 0.1:
                draw_failed.append(True)
                rig.engine.fail_next = True

    draw_failed: list[bool] = []
    copier = asyncio.create_task(copies_that_end(rig, draw))
    await asyncio.gather(*(worker() for _ in range(10)))
    copier.cancel()
    assert num_steps > 300
    assert rig.table.num_open == 0 and rig.table.adapters.num_bound == 0
    check(rig)


async def test_a_batch_without_adapters_takes_none() -> None:
    rig = Rig(adapter_slots=2)
    rig.load("1")
    (base,) = rig.open()
    assert rig.scheduler.adapter_wait.begin() is None
    await rig.step((base, DECODE, 1, 0, -1, [1]))
    rig.open(adapter="1")
    await rig.step((base, DECODE, 2, 1, -1, [1]))
    assert [batch.adapter_places for batch in rig.engine.batches] == [None, None]
    assert rig.adapter_slots.num_copies == 0


@pytest.mark.parametrize("limits", [{"batch_rows": 1}, {"chunk_tokens": 64}], ids=["short rows", "long rows"])
async def test_rows_without_an_adapter_go_on_when_the_only_one_that_has_one_is_closed(limits: Any) -> None:
    rig = Rig(slots=6, adapter_slots=1, eager=False, **limits)
    rig.load("1")
    (bound,), others = rig.open(adapter="1"), rig.open(4)

    async def go_on(future: asyncio.Future[StepResult]) -> StepResult:
        for _ in range(300):
            await asyncio.sleep(0.001)
            while rig.device.running:
                rig.device.finish()
            if future.done():
                break
            if rig.engine.waiting:
                rig.engine.run()
        return future.result()

    await go_on(rig.submit(rig.request((bound, DECODE, 1, 0, -1, [1.0]))))
    tokens = [1.0] * (1 if "batch_rows" in limits else 640)
    rows = [(other, PREFILL, 1, 0, -1, tokens) for other in others]
    waiting = rig.submit(rig.request((bound, DECODE, 2, 1, -1, [1.0]), *rows))
    await asyncio.sleep(0.005)
    rig.close(bound)
    result = await go_on(waiting)
    assert not result.refusals and not rig.scheduler.has_failed
    assert outputs(result, 1)[-1] == checksum(tokens)
    rig.table.check_integrity()


def test_steps_that_were_dropped_while_they_waited_are_forgotten_and_the_others_counted() -> None:
    def step(*states: int) -> Any:
        return SimpleNamespace(has_failures=True, state=np.array(states, dtype=np.uint8))

    waiting, refused = RowState.WAITING, RowState.REFUSED
    ready, every = ReadyQueue(0, set(), 4, 64, 10, 10), np.arange(3)
    half, gone = step(refused, waiting, refused), step(refused, refused, refused)
    ready.parked[7], ready.num_parked = [(half, every), (gone, every), (gone, every[:1])], 7
    assert ready.still_waits(7) and ready.num_parked == 3
    assert ready.parked == {7: [(half, every)]}  # the rows beside the one that waits keep their places
    half.state[1] = refused
    assert not ready.still_waits(7) and ready.num_parked == 0 and not ready.parked
