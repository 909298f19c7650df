"""Calls are captured in graphs that outlive their makers; what cannot be captured is called as it is."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deltaline_bench.timer import Timer

pytestmark = pytest.mark.gpu


@pytest.fixture
def timer() -> Timer:
    from deltaline_bench.cuda_timer import CudaTimer  # here: it needs Triton and a device

    return CudaTimer()


def counter() -> Callable[[], Tensor]:
    """A call whose state nobody else holds."""
    state = torch.zeros(1 << 20, device="cuda")
    return lambda: state.add_(1).clone()


def test_graph_keeps_what_its_call_owns(timer: Timer) -> None:
    launch = timer.prepare(counter())
    gc.collect()
    torch.cuda.empty_cache()
    garbage = torch.full((1 << 20,), 1e9, device="cuda")
    assert launch.is_captured
    first = float(launch.run()[0])
    assert float(launch.run()[-1]) == first + 1
    assert float(garbage[0]) == 1e9


def test_call_that_waits_for_the_device_is_timed_eagerly(timer: Timer) -> None:
    state = torch.ones(8, device="cuda")
    launch = timer.prepare(lambda: state * float(state.sum()))
    assert not launch.is_captured
    assert launch.reason
    timer.time(launch.run)
    assert timer.read()[0] > 0
    assert timer.prepare(counter()).is_captured
