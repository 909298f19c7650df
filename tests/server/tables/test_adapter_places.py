"""Slots: no batch ever reads another adapter than its own, nobody waits forever, and nothing is lost."""

from __future__ import annotations

import random

import pytest
from rigs.adapter_rig import Clock, FakeContent, FakeDevice
from rigs.seeds import seeds

from deltaline_server.tables.adapter_places import GRACE_S, AdapterPlaces

A, B, C = (FakeContent(name) for name in (b"a", b"b", b"c"))
CONTENTS = {1: A, 2: B, 3: C}


class Rig:
    def __init__(self, num_slots: int) -> None:
        self.clock, self.device = Clock(), FakeDevice(num_slots)
        self.places = AdapterPlaces(num_slots, self.device, self.clock)

    def make_ready(self, number: int, content: FakeContent) -> None:
        assert not self.places.request(number, content)
        self.device.finish()
        assert self.places.is_ready(number)

    def take(self, number: int, content: FakeContent) -> int | None:
        slot = self.places.acquire(number, content)
        if slot is not None:
            assert self.device.slots[slot] == content.content_hash, "the slot has another adapter"
            self.device.used.append(slot)
        return slot

    def hold(self, number: int) -> list[int]:
        slot = self.take(number, CONTENTS[number])
        assert slot is not None
        return [slot]

    def release(self, *numbers: int, slots: list[int]) -> None:
        for slot in slots:
            self.device.used.remove(slot)
        self.places.release(numbers)


def test_a_batch_gets_the_slot_once_the_copy_is_done() -> None:
    rig = Rig(2)
    assert not rig.places.request(1, A) and not rig.places.request(1, A)
    assert (len(rig.device.running), rig.places.num_copies, rig.places.num_resident) == (1, 1, 0)
    assert rig.places.acquire(1, A) is None
    rig.device.finish()
    assert rig.places.request(1, A)
    [slot] = rig.hold(1)
    assert (rig.device.slots[slot], rig.places.num_resident) == (b"a", 1)
    rig.places.check_integrity()


def test_the_least_recently_used_loses_its_slot() -> None:
    rig = Rig(2)
    rig.make_ready(1, A)
    rig.make_ready(2, B)
    for number in (2, 1):
        rig.release(number, slots=rig.hold(number))
    rig.make_ready(3, C)
    assert [rig.places.is_ready(number) for number in (1, 2, 3)] == [True, False, True]
    assert rig.places.num_evicted == 1


def test_a_slot_in_use_is_given_away_only_when_its_batches_are_over() -> None:
    rig = Rig(1)
    rig.make_ready(1, A)
    first, second = rig.hold(1), rig.hold(1)
    assert not rig.places.request(2, B)
    assert not rig.places.is_ready(1), "no later batch takes it, else the one that waits would wait forever"
    rig.release(1, slots=first)
    assert rig.device.running == [] and rig.device.slots == [b"a"]
    rig.release(1, slots=second)
    rig.device.finish()
    assert rig.places.request(2, B) and rig.device.slots == [b"b"]


@pytest.mark.parametrize("was_wanted", [False, True])
def test_one_that_was_to_leave_stays_if_nobody_else_waits_any_more(was_wanted: bool) -> None:
    rig = Rig(1)
    rig.make_ready(1, A)
    held = rig.hold(1)
    rig.places.request(2, B)
    if was_wanted:
        assert not rig.places.request(1, A)
    rig.places.cancel(2)
    assert rig.places.request(1, A)
    rig.release(1, slots=held)
    assert (rig.places.num_copies, rig.places.is_ready(1)) == (1, True)
    rig.places.check_integrity()


def test_an_adapter_that_was_just_copied_stays_for_its_first_batch() -> None:
    rig = Rig(1)
    rig.make_ready(1, A)
    rig.clock.now_s = GRACE_S / 2
    assert not rig.places.request(2, B)
    assert rig.places.is_ready(1)
    rig.clock.now_s = GRACE_S
    assert not rig.places.request(2, B)
    rig.device.finish()
    assert rig.places.is_ready(2)


@pytest.mark.parametrize("is_held", [False, True])
def test_asking_again_for_many_that_wait_is_cheap(is_held: bool) -> None:
    """Hundreds may wait, and all are asked for again and again on the thread that also serves the rows that run."""
    rig = Rig(1)
    rig.make_ready(1, A)
    if is_held:
        rig.hold(1)
    waiting = range(2, 102)
    for number in waiting:
        rig.places.request(number, FakeContent(b"%d" % number))
    rig.clock.num_asked = 0  # as often as is seen which resident may lose its slot
    for _ in range(10):
        assert not any(rig.places.request(number, FakeContent(b"%d" % number)) for number in waiting)
    assert rig.clock.num_asked <= 2 * 10


@pytest.mark.parametrize("state", ["waiting", "loading", "ready", "held", "leaving"])
def test_a_forgotten_adapter_leaves_nothing_on_the_device(state: str) -> None:
    rig = Rig(1)
    if state == "waiting":
        rig.places.request(2, B)
    rig.places.request(1, A)
    held = []
    if state not in ("waiting", "loading"):
        rig.device.finish()
    if state in ("held", "leaving"):
        held = rig.hold(1)
    if state == "leaving":
        rig.places.request(2, B)
        rig.places.cancel(2)
    rig.places.forget(1)
    rig.places.forget(1)
    if state in ("waiting", "loading"):
        rig.device.finish()
    if held:
        assert rig.device.slots == [b"a"]
        rig.release(1, slots=held)
    assert rig.device.slots == ([b"b"] if state == "waiting" else [None])
    assert rig.device.running == []
    rig.places.check_integrity()


def test_a_copy_that_failed_is_no_adapter() -> None:
    rig = Rig(1)
    rig.places.request(1, A)
    rig.device.finish(is_copied=False)
    assert rig.device.slots == [None]
    rig.make_ready(1, A)


def test_letting_go_of_what_is_not_held_is_a_bug() -> None:
    rig = Rig(1)
    rig.make_ready(1, A)
    for number in (1, 7):
        with pytest.raises(ValueError, match="expected one that a batch has taken"):
            rig.places.release([number])


def test_there_is_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="num_places: expected 1 or more, got 0"):
        AdapterPlaces(0, FakeDevice(0), Clock())


@pytest.mark.parametrize("num_slots", [1, 2, 5])
@pytest.mark.parametrize("seed", seeds(6))
def test_churn(num_slots: int, seed: int) -> None:
    """Rows of twelve adapters want batches, two at a time; copies end in any order, some fail, adapters go: every
    batch reads its own adapters, and every row gets a batch soon."""
    rig, draw = Rig(num_slots), random.Random(seed)
    contents = {number: FakeContent(b"%d" % number) for number in range(1, 13)}
    batches: list[tuple[list[int], list[int]]] = []
    waiting: dict[int, int] = {}
    next_number, num_batches, longest = len(contents) + 1, 0, 0
    for turn in range(2000):
        rig.clock.now_s += draw.random() * 0.3
        for number in contents:
            if draw.random() < 0.3:
                waiting.setdefault(number, turn)
        if len(batches) < 2:
            slots = {number: rig.take(number, contents[number]) for number in waiting}
            taken = {number: slot for number, slot in slots.items() if slot is not None}
            longest = max(longest, *(turn - waiting.pop(number) for number in taken), 0)
            batches += [(list(taken), list(taken.values()))] if taken else []
            num_batches += bool(taken)
        if batches and draw.random() < 0.6:
            numbers, held = batches.pop(0)
            rig.release(*numbers, slots=held)
        if rig.device.running and draw.random() < 0.7:
            rig.device.finish(draw.randrange(len(rig.device.running)), draw.random() < 0.95)
        if draw.random() < 0.02:
            gone = draw.choice(list(contents))
            rig.places.forget(gone)
            del contents[gone]
            waiting.pop(gone, None)
            contents[next_number] = FakeContent(b"%d" % next_number)
            next_number += 1
        rig.places.check_integrity()
    assert num_batches > 300
    assert longest < 150
    for numbers, held in batches:
        rig.release(*numbers, slots=held)
    for number in contents:
        rig.places.forget(number)
    while rig.device.running:
        rig.device.finish()
    assert rig.device.slots == [None] * num_slots
