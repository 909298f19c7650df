"""Counters and histograms as plain numbers, which the registry reads when it is scraped.

A step counts some nine things; prometheus' own counters take a lock for each, and are several times as slow. These
belong to the event loop; a scrape on another thread may find one observation in a part of its histogram only.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally:
    """A counter: whoever counts adds to its value."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Tallies(Collector):
    """A family of counters, which have the same labels."""

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def add(self, *values: str) -> Tally:
        """Return a new counter of the family. values: of its labels."""
        tally = self._tallies[values] = Tally()
        return tally

    def collect(self) -> Iterator[Metric]:
        """Yield the family; called by the registry."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, tally in self._tallies.items():
            family.add_metric(values, tally.value)
        yield family


class Spread:
    """A histogram. It takes many observations at once: a batch of 64 rows costs as much as one of 1."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the highest values of the buckets but the last, rising."""
        self._bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of a value."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class Spreads(Collector):
    """A family of histograms, which have the same labels and buckets."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        documentation: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
    ) -> None:
        self._name, self._documentation, self._bounds, self._labels = name, documentation, bounds, labels
        self._spreads: dict[tuple[str, ...], Spread] = {}
        registry.register(self)

    def add(self, *values: str) -> Spread:
        """Return a new histogram of the family. values: of its labels."""
        spread = self._spreads[values] = Spread(self._bounds)
        return spread

    def collect(self) -> Iterator[Metric]:
        """Yield the family; called by the registry."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        bounds = [*map(str, self._bounds), "+Inf"]
        for values, spread in self._spreads.items():
            buckets = list(zip(bounds, itertools.accumulate(spread.counts), strict=True))
            family.add_metric(values, buckets, spread.sum)
        yield family
