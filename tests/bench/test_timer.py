"""Sides are timed in turns, and the turns that warm up do not count."""

from __future__ import annotations

import itertools

import pytest
from bench.fakes import FakeTimer

from deltaline_bench.timer import WARMUP_ROUNDS, Times, time_in_turns


def test_statistics_are_the_median_and_the_outer_deciles() -> None:
    assert Times.of([float(value) for value in range(10, -1, -1)]) == Times(5.0, 1.0, 9.0)
    assert Times.of([7.0]) == Times(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="at least one time"):
        Times.of([])


def test_sides_take_turns() -> None:
    calls: list[str] = []
    taken = time_in_turns(
        FakeTimer(1.0, 20.0), {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3
    )
    assert taken == {"a": Times(1.0, 1.0, 1.0), "b": Times(20.0, 20.0, 20.0)}
    assert calls == ["a", "b"] * (WARMUP_ROUNDS + 3)


def test_warm_up_is_not_counted() -> None:
    class Warming(FakeTimer):
        def __init__(self) -> None:
            super().__init__()
            self._times = itertools.chain([1000.0] * WARMUP_ROUNDS, itertools.repeat(2.0))

    assert time_in_turns(Warming(), {"a": lambda: None}, rounds=5)["a"] == Times(2.0, 2.0, 2.0)


def test_rounds_are_positive() -> None:
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        time_in_turns(FakeTimer(1.0), {}, rounds=0)
