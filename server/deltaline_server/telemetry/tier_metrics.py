"""Metrics of the tiers beside the device, read at each scrape; none where there are no such tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class TierCounts(Protocol):
    """What one tier holds, and how often states came and went. All are of the tier's whole life but the bytes."""

    @property
    def used_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...
    @property
    def num_stored(self) -> int: ...
    @property
    def num_loaded(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    @property
    def num_missed(self) -> Mapping[str, int]: ...


class TierMetrics(Collector):
    """How full each tier is, and what it did."""

    def __init__(self, tiers: Mapping[str, TierCounts]) -> None:
        """tiers: by name."""
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        """Yield the families; called by the registry, on the scraper's thread."""
        gauges: tuple[tuple[str, str, Callable[[TierCounts], int]], ...] = (
            ("used", "Bytes of stored states, by tier.", lambda tier: tier.used_bytes),
            ("limit", "Bytes for stored states, by tier.", lambda tier: tier.limit_bytes),
        )
        for name, text, read in gauges:
            gauge = GaugeMetricFamily(f"deltaline_state_tier_{name}_bytes", text, labels=("tier",))
            for tier, counts in self._tiers.items():
                gauge.add_metric((tier,), read(counts))
            yield gauge
        counters: tuple[tuple[str, str, Callable[[TierCounts], int]], ...] = (
            ("stored", "States stored, by tier.", lambda tier: tier.num_stored),
            ("loaded", "Stored states read, by tier.", lambda tier: tier.num_loaded),
            ("evicted", "Stored states that made way, by tier.", lambda tier: tier.num_evicted),
        )
        for name, text, read in counters:
            counter = CounterMetricFamily(f"deltaline_states_{name}", text, labels=("tier",))
            for tier, counts in self._tiers.items():
                counter.add_metric((tier,), read(counts))
            yield counter
        text = "States not stored or not read, by tier and reason."
        missed = CounterMetricFamily("deltaline_state_misses", text, labels=("tier", "reason"))
        for tier, counts in self._tiers.items():
            for reason, count in counts.num_missed.items():
                missed.add_metric((tier, reason), count)
        yield missed
