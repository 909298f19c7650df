"""Small batches are launched and told by the thread that submits; the others by the engine's; all in order."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rigs.scheduler_rig import turns

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.engine.engine import SMALL_BYTES, Engine
from deltaline_server.engine.executor import DeviceCounts, Launched, Report
from deltaline_server.scheduling.in_flight import LINGER_S, BatchInFlight, InFlight
from deltaline_server.tables.pages import PagesPlaced

WAIT_S = 100.0


class HeldDevice:
    """Computes a batch when it is told to, the first one first. What happens is noted."""

    is_asynchronous = True
    is_gone = False

    def __init__(self) -> None:
        self.launched_by: list[int] = []
        self.events: list[str] = []
        self.zeroed_by: list[int] = []
        self._waiting: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        self.cannot_tell = False
        self.may_launch = threading.Event()
        self.may_launch.set()

    def prepare(self, report: Report) -> None:
        pass

    def launch(self, batch: StepBatch) -> Launched:
        assert self.may_launch.wait(WAIT_S)
        done, number = threading.Event(), len(self.launched_by)
        self.launched_by.append(threading.get_ident())
        self.events.append(f"launch {number}")
        self._waiting.put(done)

        def is_done() -> bool:
            if self.cannot_tell:
                raise RuntimeError("the device is lost")
            return done.is_set()

        def result() -> BatchResult:
            assert done.wait(WAIT_S)
            if self.cannot_tell:
                raise RuntimeError("the device is lost")
            return BatchResult(batch.hidden[0], np.ones(1, bool), compute_s=float(number))

        return Launched(is_done, result)

    def finish_one(self) -> None:
        self._waiting.get(timeout=WAIT_S).set()

    def place_pages(self, placed: PagesPlaced) -> None:
        raise AssertionError("no layer has pages")

    def zero(self, lines: NDArray[np.int64]) -> None:
        self.events.append("zero")
        self.zeroed_by.append(threading.get_ident())

    def transfer(self, work: Callable[[], None]) -> Future[None]:
        raise AssertionError("nothing is copied between tiers")

    def is_lost(self) -> bool:
        return self.cannot_tell

    def close(self) -> None:
        pass

    def counts(self) -> DeviceCounts:
        return DeviceCounts()


@pytest.fixture
def device() -> HeldDevice:
    return HeldDevice()


@pytest.fixture
def engine(device: HeldDevice) -> Iterator[Engine]:
    engine = Engine(device, torch.device("cpu"))
    engine.start()
    yield engine
    engine.close()


def make_batch(num_bytes: int = 64) -> StepBatch:
    control = np.zeros((7, 2), np.int32)
    control[0, 1] = 1
    return StepBatch(0, control, 1, (np.zeros((1, num_bytes // 4), np.float32),), None, copied_bytes=num_bytes)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(1e-3)


def test_a_small_batch_is_launched_and_told_by_who_polls(engine: Engine, device: HeldDevice) -> None:
    told: list[int] = []
    engine.submit(make_batch(), lambda result: told.append(threading.get_ident()), polls=True)
    assert device.launched_by == [threading.get_ident()]
    assert engine.poll() and not told
    device.finish_one()
    assert not engine.poll() and told == [threading.get_ident()]
    assert engine.heartbeat_s() == 0.0


def test_a_large_batch_and_one_of_who_does_not_poll_go_by_the_threads(engine: Engine, device: HeldDevice) -> None:
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    for batch, polls in ((make_batch(SMALL_BYTES + 4), True), (make_batch(), False)):
        engine.submit(batch, lambda result: told.put(threading.get_ident()), polls=polls)
        device.finish_one()
        assert told.get(timeout=WAIT_S) != threading.get_ident()
        assert not engine.poll()
    assert threading.get_ident() not in device.launched_by


def test_nothing_overtakes_what_the_threads_have_to_launch(engine: Engine, device: HeldDevice) -> None:
    results: list[float] = []
    device.may_launch.clear()
    engine.submit(make_batch(), lambda result: results.append(result.compute_s))
    engine.zero_lines(np.array([1]))
    engine.submit(make_batch(), lambda result: results.append(result.compute_s), polls=True)
    assert device.events == []
    device.may_launch.set()
    device.finish_one()
    device.finish_one()
    until(lambda: len(results) == 2)
    assert device.events == ["launch 0", "zero", "launch 1"]
    assert results == [0.0, 1.0] and not engine.poll()


def test_what_comes_is_launched_at_once_while_a_thread_only_waits_for_results(
    engine: Engine, device: HeldDevice
) -> None:
    results: list[float] = []
    engine.submit(make_batch(), lambda result: results.append(result.compute_s))
    me = threading.get_ident()

    def zeroes_at_once() -> bool:
        before = len(device.zeroed_by)
        engine.zero_lines(np.array([1]))
        return device.zeroed_by[before:] == [me]

    until(zeroes_at_once)
    engine.submit(make_batch(), lambda result: results.append(result.compute_s), polls=True)
    assert device.launched_by[0] != me == device.launched_by[1]
    assert (device.events[0], device.events[-1]) == ("launch 0", "launch 1")
    device.finish_one()
    until(lambda: results == [0.0])
    assert engine.poll()
    device.finish_one()
    assert not engine.poll() and results == [0.0, 1.0]
    assert engine.heartbeat_s() == 0.0


def test_who_hears_of_a_batch_may_launch_the_next_one(engine: Engine, device: HeldDevice) -> None:
    results: list[float] = []

    def again(result: BatchResult) -> None:
        results.append(result.compute_s)
        if len(results) < 3:
            engine.submit(make_batch(), again, polls=True)

    engine.submit(make_batch(), again, polls=True)
    for left in (True, True, False):
        device.finish_one()
        assert engine.poll() == left
    assert results == [0.0, 1.0, 2.0] and set(device.launched_by) == {threading.get_ident()}


@pytest.mark.parametrize("polls", [False, True])
def test_the_heartbeat_stands_still_while_a_batch_runs(engine: Engine, device: HeldDevice, polls: bool) -> None:
    assert engine.heartbeat_s() == 0.0
    for _ in range(3):
        engine.submit(make_batch(), lambda result: None, polls=polls)
    until(lambda: len(device.launched_by) == 3 and engine.heartbeat_s() > 0.01)
    first = engine.heartbeat_s()
    assert 0 < first < engine.heartbeat_s()
    device.finish_one()
    until(lambda: (engine.poll() or not polls) and engine.heartbeat_s() < first)  # it takes turns again
    device.finish_one()
    device.finish_one()
    until(lambda: not engine.poll() and engine.heartbeat_s() == 0.0)


def test_a_device_that_cannot_tell_fails_its_batches(engine: Engine, device: HeldDevice) -> None:
    results: list[BatchResult] = []
    engine.submit(make_batch(), results.append, polls=True)
    device.cannot_tell = True
    device.finish_one()
    assert not engine.poll()
    assert results[0].failed and engine.failed()


def test_close_tells_what_was_not_polled(device: HeldDevice) -> None:
    engine = Engine(device, torch.device("cpu"))
    engine.start()
    results: list[BatchResult] = []
    engine.submit(make_batch(), results.append, polls=True)
    device.finish_one()
    engine.close()
    assert len(results) == 1 and not results[0].failed and not engine.poll()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(make_batch(), results.append, polls=True)


async def test_results_come_to_the_loop_in_the_order_of_the_batches(engine: Engine, device: HeldDevice) -> None:
    landed: list[float] = []
    all_landed = asyncio.Event()
    sizes = [64, SMALL_BYTES + 4, 64, 64, SMALL_BYTES + 4, SMALL_BYTES + 4, 64]

    def land(batch: BatchInFlight, result: BatchResult) -> None:
        landed.append(result.compute_s)
        if len(landed) == len(sizes):
            all_landed.set()

    in_flight = InFlight(engine, land, time.monotonic)
    for size in sizes:
        in_flight.start(BatchInFlight([], make_batch(size), 0.0, 0.0))
    assert len(in_flight.batches) == len(sizes)
    for _ in sizes:
        await turns(3)
        await asyncio.to_thread(device.finish_one)
    await asyncio.wait_for(all_landed.wait(), WAIT_S)
    assert landed == [float(number) for number in range(len(sizes))]


async def test_a_thread_that_is_sooner_waits_for_the_batch_before_it() -> None:
    class Hasty:
        """Tells the second batch, by a thread, before the first one is polled."""

        def __init__(self) -> None:
            self.waiting: list[Callable[[BatchResult], None]] = []
            self.may_poll = False

        def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
            self.waiting.append(on_done)

        def poll(self) -> bool:
            if self.may_poll and self.waiting:
                self.waiting.pop(0)(BatchResult(np.zeros((0, 1)), np.ones(1, bool), compute_s=1.0))
            return bool(self.waiting)

    engine, landed, times = Hasty(), list[float](), list[float]()

    def land(batch: BatchInFlight, result: BatchResult) -> None:
        landed.append(result.compute_s)
        times.append(batch.done_s)

    in_flight = InFlight(engine, land, time.monotonic)
    for _ in range(2):
        in_flight.start(BatchInFlight([], make_batch(), 0.0, 0.0))
    await asyncio.to_thread(engine.waiting.pop(1), BatchResult(np.zeros((0, 1)), np.ones(1, bool), compute_s=2.0))
    await turns()
    assert not landed
    engine.may_poll = True
    await turns()
    assert landed == [1.0, 2.0] and not len(in_flight.batches)
    assert times == sorted(times)  # or the device would have been busy for a negative time


class Polled:
    """An engine whose batches are started on a loop with a clock that stands still, and the polls of it counted."""

    def __init__(self, engine: Engine, device: HeldDevice) -> None:
        self._engine, self._device = engine, device
        self.now_s, self.count = 5.0, 0
        self.landed: list[BatchInFlight] = []
        self.num_behind = 0
        """So many batches are started as the ones before them land."""
        self.in_flight = InFlight(self, self.land, lambda: self.now_s)

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
        self._engine.submit(batch, on_done, polls)

    def poll(self) -> bool:
        self.count += 1
        return self._engine.poll()

    def start(self, num_bytes: int = 64) -> None:
        self.in_flight.start(BatchInFlight([], make_batch(num_bytes), 0.0, 0.0))

    def land(self, batch: BatchInFlight, result: BatchResult) -> None:
        self.landed.append(batch)
        if self.num_behind:
            self.num_behind -= 1
            self.start()

    async def has_landed(self, count: int) -> None:
        self._device.finish_one()
        while len(self.landed) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def in_ten_turns(self) -> int:
        """How often it is polled."""
        self.count = 0
        await turns(10)
        return self.count


@pytest.fixture
def polled(engine: Engine, device: HeldDevice) -> Polled:
    return Polled(engine, device)


async def test_it_is_polled_once_in_a_turn_however_many_batches_follow(polled: Polled) -> None:
    """A batch that is started as the one before it lands must not begin a second round of polls beside the first."""
    polled.num_behind = 5
    polled.start()
    for count in range(1, 7):
        await polled.has_landed(count)
        assert await polled.in_ten_turns() == 10
    polled.now_s += LINGER_S
    await turns(1)
    assert await polled.in_ten_turns() == 0, "nothing is in flight, and nobody has come for the next step"


async def test_the_loop_stays_awake_for_the_next_step_but_not_beside_a_batch_of_the_threads(polled: Polled) -> None:
    polled.start()
    await polled.has_landed(1)
    assert await polled.in_ten_turns() == 10
    polled.start(SMALL_BYTES + 4)
    await turns()
    assert await polled.in_ten_turns() == 0, "its threads need the interpreter"
    await polled.has_landed(2)
    assert await polled.in_ten_turns() == 0
    polled.start()
    await polled.has_landed(3)
    assert await polled.in_ten_turns() == 10
    polled.now_s += LINGER_S
    await turns()
    assert await polled.in_ten_turns() == 0


class Prompt:
    """An engine whose threads have a result before the loop's next turn, or which is polled for it."""

    def __init__(self, by_thread: bool) -> None:
        self.by_thread, self.num_polls = by_thread, 0
        self.waiting: list[Callable[[BatchResult], None]] = []

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
        if self.by_thread:
            thread = threading.Thread(target=on_done, args=(BatchResult(np.zeros((0, 1)), np.ones(1, bool)),))
            thread.start()
            thread.join()
        else:
            self.waiting.append(on_done)

    def poll(self) -> bool:
        self.num_polls += 1
        while self.waiting:
            self.waiting.pop()(BatchResult(np.zeros((0, 1)), np.ones(1, bool)))
        return False


async def test_a_result_that_a_thread_has_before_it_is_polled_keeps_nobody_awake() -> None:
    engine, landed = Prompt(by_thread=True), list[BatchInFlight]()
    in_flight = InFlight(engine, lambda batch, result: landed.append(batch), lambda: 5.0)
    in_flight.start(BatchInFlight([], make_batch(), 0.0, 0.0))
    await turns()
    assert (len(landed), engine.num_polls) == (1, 1)


async def test_polling_goes_on_after_a_fault_of_who_is_told() -> None:
    engine, landed = Prompt(by_thread=False), list[BatchInFlight]()
    now_s = 5.0

    def land(batch: BatchInFlight, result: BatchResult) -> None:
        landed.append(batch)
        if len(landed) == 1:
            raise RuntimeError("a planted fault")

    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context["exception"]))
    in_flight = InFlight(engine, land, lambda: now_s)
    for _ in range(2):
        in_flight.start(BatchInFlight([], make_batch(), 0.0, 0.0))
        await turns()
        now_s += LINGER_S
        await turns()
    assert len(landed) == 2 and len(faults) == 1


async def test_a_result_that_a_thread_has_right_after_the_loop_looked_for_it_is_told() -> None:
    engine, landed = Missed(), list[BatchInFlight]()
    in_flight = InFlight(engine, lambda batch, result: landed.append(batch), lambda: 5.0)
    in_flight.start(LookedFor(engine))
    await turns()
    assert len(landed) == 1


class Missed:
    """An engine that is never polled in vain: its threads tell all."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[BatchResult], None]] = []

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
        self.waiting.append(on_done)

    def poll(self) -> bool:
        return False


class LookedFor(BatchInFlight):
    """A thread of the engine has its result as soon as somebody has looked for it in vain."""

    def __init__(self, engine: Missed) -> None:
        super().__init__([], make_batch(), 0.0, 0.0)
        self.engine = engine

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "result" and found is None:
            tell = self.engine.waiting.pop()
            thread = threading.Thread(target=tell, args=(BatchResult(np.zeros((0, 1)), np.ones(1, bool)),))
            thread.start()
            thread.join()
        return found
