"""Sides are timed in turns, and the turns that warm up do not count."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rigs.fake_timer import FakeTimer

from deltaline_bench import ceilings
from deltaline_bench.timer import WARMUP_ROUNDS, Times, time_in_turns


def test_statistics_are_the_median_and_the_outer_deciles() -> None:
    assert Times.of([float(value) for value in range(10, -1, -1)]) == Times(5.0, 1.0, 9.0)
    assert Times.of([7.0]) == Times(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="at least one time"):
        Times.of([])


def test_sides_take_turns_and_warming_up_is_not_counted() -> None:
    calls: list[str] = []
    timer = FakeTimer(1.0, 20.0, first=[1000.0] * 2 * WARMUP_ROUNDS)
    taken = time_in_turns(timer, {name: partial(calls.append, name) for name in "ab"}, rounds=3)
    assert taken == {"a": Times(1.0, 1.0, 1.0), "b": Times(20.0, 20.0, 20.0)}
    assert calls == ["a", "b"] * (WARMUP_ROUNDS + 3)


def test_ceilings_count_what_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "STREAM_BYTES", 1 << 20)
    for name in ("do_nothing", "copy_all", "read_all"):
        monkeypatch.setattr(ceilings, name, lambda *tensors: None)
    # The floor, a kernel's copy, torch's own, the read.
    timer = FakeTimer(4.0, 30.0, 20.0, 15.0)
    measured = ceilings.measure_ceilings(timer, torch.device("cpu"), rounds=1)
    assert measured.floor_us == 4.0
    assert measured.copy_bytes_per_s == pytest.approx(2 * (1 << 20) / 20e-6)
    assert measured.read_bytes_per_s == pytest.approx((1 << 20) / 15e-6)
