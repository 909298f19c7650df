"""Signs of life: who says nothing, or whose connection closes, is gone, and that is told once."""

from __future__ import annotations

import queue
import time
from typing import cast

import pytest
from torch import Tensor

from deltaline_server.engine import rank_pulse
from deltaline_server.engine.rank_pulse import Beating, Listening
from deltaline_server.ranks.ways import Ranks

WAIT_S = 10.0


class Way:
    """Rank 1's connection to rank 0, as both ends see it."""

    world_size = 2

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self.is_open = True

    def give(self, tensor: Tensor, rank: int) -> None:
        assert rank == 0
        if not self.is_open:
            raise RuntimeError("closed")
        self.said.put(tensor.clone())

    def take(self, tensor: Tensor, rank: int) -> None:
        said = self.said.get(timeout=WAIT_S)
        if said is None:
            raise RuntimeError("closed")
        tensor.copy_(said)


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Way:
    monkeypatch.setattr(rank_pulse, "BEAT_S", 0.02)
    return Way()


def test_who_beats_and_says_that_it_ends_is_never_gone(way: Way) -> None:
    gone: list[object] = []
    listening = Listening(cast(Ranks, way), lambda *why: gone.append(why))
    beating = Beating(cast(Ranks, way), lambda: gone.append("lost"))
    time.sleep(0.5)
    beating.stop()
    time.sleep(0.5)
    listening.stop()
    assert gone == []


@pytest.mark.parametrize("closes", [True, False])
def test_who_closes_or_is_silent_is_gone_once(way: Way, closes: bool) -> None:
    gone: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    listening = Listening(cast(Ranks, way), lambda *why: gone.put(why))
    if closes:
        way.said.put(None)
    assert gone.get(timeout=WAIT_S) == (1, "it ended" if closes else "it is silent")
    time.sleep(0.3)
    assert gone.empty()
    way.said.put(None)
    listening.stop(0.0)


def test_rank_0_that_closes_is_lost_to_the_others(way: Way) -> None:
    lost: queue.SimpleQueue[bool] = queue.SimpleQueue()
    way.is_open = False
    Beating(cast(Ranks, way), lambda: lost.put(True))
    assert lost.get(timeout=WAIT_S)
