"""Rank 0's places for adapters: what it asks of the others is answered before it asks again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deltaline_server.adapters.shared_store import SharedStore


class Way:
    """To two other ranks, which answer what they are told. answers: those that were not taken yet."""

    world_size = 3

    def __init__(self) -> None:
        self.answers = 0

    def broadcast(self, told: Tensor) -> None:
        self.answers += self.world_size - 1

    def take(self, done: Tensor, rank: int) -> None:
        self.answers -= 1


def fail(place: int) -> None:
    raise ValueError(f"place: expected 0 .. 3, got {place}")


def test_answers_are_taken_also_where_rank_0_fails() -> None:
    way, own = Way(), SimpleNamespace(clear=fail, device=torch.device("cpu"))
    store = SharedStore(own, way)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 9"):
        store.clear(9)
    assert way.answers == 0, "the next order would take them for its own"
