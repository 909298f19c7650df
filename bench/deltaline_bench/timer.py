"""Times of several sides taken in turns, so that a drifting clock hits all of them alike.

Knows rounds and statistics; a Timer knows the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

WARMUP_ROUNDS = 10


@dataclass(frozen=True)
class Launch:
    """A prepared call.

    Args:
        run: does the work once more and returns what it wrote.
        result: what the last preparing call wrote; where `is_captured`, every run writes the same tensors.
        is_captured: `run` replays a graph; otherwise it is the call itself and `reason` says why.
    """

    run: Callable[[], Any]
    result: Any
    is_captured: bool
    reason: str = ""


class Timer(Protocol):
    """A device's clock."""

    def prepare(self, call: Callable[[], Any]) -> Launch:
        """Warm `call` up and make it replayable where that is possible."""
        ...

    def time(self, run: Callable[[], Any]) -> None:
        """Time one run with cold caches; may return before it has ended."""
        ...

    def read(self) -> list[float]:
        """Wait, and return the microseconds of the runs since the last read, in their order."""
        ...


@dataclass(frozen=True)
class Times:
    """Median and the 10th and 90th percentile, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float

    @classmethod
    def of(cls, values_us: Sequence[float]) -> Times:
        """Summarise at least one time."""
        if not values_us:
            raise ValueError("values_us: expected at least one time, got none")
        if len(values_us) == 1:
            return cls(values_us[0], values_us[0], values_us[0])
        deciles = statistics.quantiles(values_us, n=10, method="inclusive")
        return cls(statistics.median(values_us), deciles[0], deciles[-1])


def time_in_turns(timer: Timer, runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    """Time every run once per round, after rounds that do not count.

    Raises:
        ValueError: `rounds` is not positive.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(WARMUP_ROUNDS + rounds):
        for run in runs.values():
            timer.time(run)
        values = timer.read()
        if turn >= WARMUP_ROUNDS:
            for name, value in zip(runs, values, strict=True):
                taken[name].append(value)
    return {name: Times.of(values) for name, values in taken.items()}
