"""Adapter slots: what was copied to one is all that is there; copies run beside all else and tell how they went."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.adapter_cases import NEXT, QWEN3_5, fill_slots, random_adapter
from rigs.adapter_rig import FakeContent
from torch import Tensor

from deltaline_server.adapters.copier import AdapterCopier
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import Packed, Placement
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.lora_places import AdapterStore, store_bytes
from deltaline_server.models.lora_weights import Adapter

WAIT_S = 20.0


def make_layout(
    device: str = "cpu", config: ModelConfig = NEXT, dtype: torch.dtype = torch.float32, **changes: Any
) -> AdapterLayout:
    # With its index, as tensors on it name it.
    placement = Placement(torch.empty(0, device=device).device, dtype, **changes)
    return AdapterLayout(config, Scope.BLOCK, (0, 1), placement)


def tensors(store: AdapterStore) -> list[Tensor]:
    """Everything of the slots; the first dimension is the slot."""
    found = []
    for layer in (0, 1):
        for weights in store.layer(layer).values():
            assert weights.factors is not None
            found += [weights.a, weights.b, weights.ranks, weights.scales, weights.factors]
    return found


def content(store: AdapterStore, slot: int) -> list[Tensor]:
    return [tensor[slot].cpu() for tensor in tensors(store)]


@pytest.mark.parametrize("config", [NEXT, QWEN3_5], ids=["interleaved", "separate"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_bytes_are_known_before_they_are_allocated(config: ModelConfig, world_size: int) -> None:
    layout = make_layout(config=config, dtype=torch.bfloat16, rank=world_size - 1, world_size=world_size)
    store = AdapterStore(layout, 3, 8)
    assert store.total_bytes == sum(tensor.nbytes for tensor in tensors(store)) == store_bytes(layout, 3, 8)
    assert not any(tensor.any() for tensor in tensors(store))
    assert store_bytes(layout, 10**12, 8) > 1 << 53


@pytest.mark.parametrize(
    ("num_slots", "max_rank", "message"),
    [(0, 8, "num_places: expected at least 1, got 0"), (1, 0, r"max_rank: expected 1\.\.512, got 0"), (1, 513, "512")],
)
def test_slots_that_cannot_be_are_refused(num_slots: int, max_rank: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        AdapterStore(make_layout(), num_slots, max_rank)


def test_nothing_of_the_adapter_before_is_left(device: str) -> None:
    layout = make_layout(device)
    used, fresh = AdapterStore(layout, 3, 8), AdapterStore(layout, 3, 8)
    large, small = random_adapter(layout, 2, 8, dora=True), random_adapter(layout, 3, 2)
    some = replace(small, weights=tuple(one for one in small.weights if one.packed is Packed.IN_PROJ))
    fill_slots(used, {0: large, 1: large, 2: large})
    before = content(used, 0)
    fill_slots(used, {1: some})
    fill_slots(fresh, {1: some})
    assert all(map(torch.equal, content(used, 1), content(fresh, 1)))
    used.clear(2)
    assert not any(tensor.any() for tensor in content(used, 2))
    assert all(map(torch.equal, content(used, 0), before)) and all(tensor.any() for tensor in before)


def test_what_a_slot_has_no_room_for_is_refused_and_nothing_written() -> None:
    layout = make_layout()
    store, adapter = AdapterStore(layout, 2, 8), random_adapter(layout, 1)
    store.write(1, adapter)
    before = content(store, 1)
    other = random_adapter(make_layout(config=QWEN3_5), 1)
    elsewhere = replace(adapter, weights=(*adapter.weights, replace(adapter.weights[0], layer=2)))
    for wrong in (other, elsewhere):
        with pytest.raises(ValueError, match="adapter: expected projections of this model, got another in_proj"):
            store.write(1, wrong)
    with pytest.raises(ValueError, match="adapter: expected ranks up to 8, got 9"):
        store.write(1, random_adapter(layout, 3, 9))
    for slot in (-1, 2):
        with pytest.raises(IndexError, match=rf"place: expected 0\.\.1, got {slot}"):
            store.write(slot, adapter)
    assert all(map(torch.equal, content(store, 1), before))


class Rig:
    """A copier whose calls come when the test takes them, and which waits in each copy until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layout = make_layout()
        self.store = AdapterStore(self.layout, 2, 8)
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.may_copy, self.copies = threading.Semaphore(0), 0
        write = self.store.write

        def held(slot: int, adapter: Adapter) -> None:
            assert self.may_copy.acquire(timeout=WAIT_S)
            write(slot, adapter)
            self.copies += 1

        monkeypatch.setattr(self.store, "write", held)
        self.copier = AdapterCopier(self.store, self.calls.put)
        self.told: list[tuple[str, bool]] = []

    def copy(self, slot: int, adapter: Adapter, name: str) -> None:
        self.copier.copy(slot, adapter, lambda is_copied: self.told.append((name, is_copied)))

    def take_call(self) -> None:
        self.calls.get(timeout=WAIT_S)()


def test_copies_are_told_when_they_are_over_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    first, second = random_adapter(rig.layout, 1), random_adapter(rig.layout, 2)
    rig.copy(0, first, "first")
    rig.copier.clear(0)
    rig.copy(1, second, "second")
    assert rig.calls.empty() and not rig.told
    rig.may_copy.release()
    rig.take_call()
    assert rig.told == [("first", True)] and rig.copies == 1
    rig.may_copy.release()
    rig.copier.close()
    rig.take_call()
    assert rig.told == [("first", True), ("second", True)] and rig.calls.empty()
    assert not any(tensor.any() for tensor in content(rig.store, 0))
    assert all(tensor.any() for tensor in content(rig.store, 1))


def test_a_copy_that_fails_is_told_logged_and_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(monkeypatch)
    rig.may_copy.release(2)
    with caplog.at_level(logging.ERROR):
        rig.copy(0, random_adapter(rig.layout, 1, 9), "too large")
        rig.copy(0, random_adapter(rig.layout, 1), "right")
        rig.copier.close()
    rig.take_call()
    rig.take_call()
    assert rig.told == [("too large", False), ("right", True)]
    assert "writing adapter slot 0 failed" in caplog.text


def test_after_the_end_copies_go_wrong_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.copier.close()
    rig.copier.close()
    rig.copy(0, random_adapter(rig.layout, 1), "late")
    rig.copier.clear(0)
    assert not rig.told
    rig.take_call()
    assert rig.told == [("late", False)] and rig.copies == 0


def test_whoever_copies_while_it_ends_is_told_once() -> None:
    layout = make_layout()
    store, adapter = AdapterStore(layout, 1, 8), random_adapter(layout, 1)
    for _ in range(20):
        calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        copier, told = AdapterCopier(store, calls.put), queue.SimpleQueue[bool]()
        closer = threading.Thread(target=copier.close)
        for number in range(12):
            copier.copy(0, adapter, told.put)
            if number == 4:
                closer.start()
        closer.join()
        for _ in range(12):
            calls.get(timeout=WAIT_S)()
        assert told.qsize() == 12 and calls.empty()


def test_what_is_no_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    with pytest.raises(TypeError, match="content: expected an Adapter, got FakeContent"):
        rig.copier.copy(0, FakeContent(b"a"), lambda _: None)
    rig.copier.close()
