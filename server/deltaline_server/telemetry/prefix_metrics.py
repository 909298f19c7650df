"""Metrics of what is found of prompts, read at each scrape: by tier, or by why nothing is."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.prefixes.cost import Tier
from deltaline_server.tables.prefixes.index import Miss

CHEAPER_TO_COMPUTE = "CHEAPER_TO_COMPUTE"


class PrefixMetrics(Collector):
    """Hits and misses of FindSnapshots, and of opens with the keys of a prompt."""

    def __init__(self, snapshots: SnapshotTable) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """Yield the families; called by the registry, on the scraper's thread."""
        hits = CounterMetricFamily("deltaline_prefix_hits", "Prompts of which a state was found.", labels=("tier",))
        for tier in Tier:
            hits.add_metric((tier.name,), self._snapshots.hits[tier])
        yield hits
        text = "Prompts of which no state was found, or none that was worth it."
        misses = CounterMetricFamily("deltaline_prefix_misses", text, labels=("reason",))
        for reason in (*Miss, None):
            label = CHEAPER_TO_COMPUTE if reason is None else reason.name
            misses.add_metric((label,), self._snapshots.misses[reason])
        yield misses
