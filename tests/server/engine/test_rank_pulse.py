"""Signs of life: who says nothing, or whose connection closes, is gone, and that is told once."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
from torch import Tensor

from deltaline_server.engine import rank_pulse
from deltaline_server.engine.rank_pulse import Pulse
from deltaline_server.ranks.ways import Ranks

WAIT_S = 10.0
LIVES, ENDS = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)


class Way:
    """The connection of ranks 0 and 1, as both ends see it; each thread that takes knows from whom."""

    world_size = 2

    def __init__(self) -> None:
        # By who takes it.
        self.said: dict[int, queue.SimpleQueue[Tensor | None]] = {0: queue.SimpleQueue(), 1: queue.SimpleQueue()}
        self.is_open, self.passes = True, threading.Event()
        self.passes.set()

    def give(self, tensor: Tensor, rank: int) -> None:
        if not self.is_open:
            raise RuntimeError("closed")
        assert self.passes.wait(WAIT_S)
        self.said[rank].put(tensor.clone())

    def take(self, tensor: Tensor, rank: int) -> None:
        said = self.said[1 - rank].get(timeout=WAIT_S)
        if said is None:
            raise RuntimeError("closed")
        tensor.copy_(said)


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Way:
    monkeypatch.setattr(rank_pulse, "BEAT_S", 0.02)
    return Way()


def test_who_beats_and_says_that_it_ends_is_never_gone(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pulse, "MISSED", 500)  # a busy host may let threads wait
    gone: list[str] = []
    pulses = [Pulse(cast(Ranks, way), rank, gone.append) for rank in (1, 0)]
    time.sleep(0.5)
    with ThreadPoolExecutor(2) as pool:
        begin_s = time.monotonic()
        list(pool.map(lambda pulse: pulse.stop(2 * WAIT_S), pulses))
    assert gone == [] and time.monotonic() - begin_s < WAIT_S


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("closes", [True, False])
def test_who_closes_or_is_silent_is_gone_once(way: Way, rank: int, closes: bool) -> None:
    gone: queue.SimpleQueue[str] = queue.SimpleQueue()
    pulse = Pulse(cast(Ranks, way), rank, gone.put)
    time.sleep(0.5)
    assert gone.empty(), "who has not said anything yet may have more to prepare"
    way.said[1 - rank].put(None if closes else LIVES)
    assert gone.get(timeout=WAIT_S) == ("it ended" if closes else "it is silent")
    time.sleep(0.3)
    assert gone.empty()
    way.said[1 - rank].put(None)
    pulse.stop(0.1)


@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_rank_0_leaves_behind_does_not_wait_for_ever(way: Way, rank: int) -> None:
    """It may have failed, and say so to nobody; a rank that ends before rank 0 does was told to."""
    gone: queue.SimpleQueue[str] = queue.SimpleQueue()
    pulse = Pulse(cast(Ranks, way), rank, gone.put)
    way.said[1 - rank].put(ENDS)
    if rank:
        time.sleep(0.5)
        assert gone.empty()
    else:
        assert gone.get(timeout=WAIT_S) == "it is silent"
    pulse.stop(0.1)


def test_who_begins_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever hangs before its first word is waited for for ever."""
    monkeypatch.setattr(rank_pulse, "BEAT_S", WAIT_S)
    way = Way()
    pulse = Pulse(cast(Ranks, way), 1, lambda why: None)
    assert torch.equal(cast(Tensor, way.said[1].get(timeout=WAIT_S / 2)), LIVES)
    way.said[0].put(None)
    pulse.stop(0.1)


def test_who_is_not_heard_counts_all_the_same(way: Way) -> None:
    """A word waits for a rank that hangs to take it."""
    gone: queue.SimpleQueue[str] = queue.SimpleQueue()
    way.passes.clear()
    pulse = Pulse(cast(Ranks, way), 1, gone.put)
    way.said[0].put(LIVES)
    assert gone.get(timeout=WAIT_S) == "it is silent"
    way.passes.set()
    way.said[0].put(None)
    pulse.stop(0.1)


def test_who_can_not_be_told_is_gone(way: Way) -> None:
    gone: queue.SimpleQueue[str] = queue.SimpleQueue()
    way.is_open = False
    Pulse(cast(Ranks, way), 0, gone.put)
    assert gone.get(timeout=WAIT_S) == "it ended"
    way.said[1].put(None)
