"""Metrics by principal, read at each scrape: the first of the file have labels of their own, the others one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.tables.sequences import SequenceTable

MAX_LABELS = 32
OTHER = "other"


class PrincipalMetrics(Collector):
    """What each principal has and has had."""

    def __init__(self, names: Callable[[], Mapping[int, str]], table: SequenceTable, scheduler: Scheduler) -> None:
        """names: of the principals that there are, by number, in their order."""
        self._names, self._table, self._scheduler = names, table, scheduler

    def collect(self) -> Iterator[Metric]:
        """Yield the families; called by the registry, on the scraper's thread."""
        names = dict(list(self._names().items())[:MAX_LABELS])
        use = list(self._scheduler.use.items())
        for name, text, numbers in (
            ("sequences", "Sequences open, by principal.", list(self._table.num_open_of.items())),
            ("queue_rows", "Rows that wait or run, by principal.", [(i, one.rows) for i, one in use]),
        ):
            gauge = GaugeMetricFamily(f"deltaline_principal_{name}", text, labels=("principal",))
            for principal, number in _sums(names, numbers).items():
                gauge.add_metric((principal,), number)
            yield gauge
        for name, text, numbers in (
            ("rows", "Rows that ran, by principal.", [(i, one.rows_run) for i, one in use]),
            ("tokens", "Tokens that the device was given, by principal.", [(i, one.tokens_run) for i, one in use]),
        ):
            counter = CounterMetricFamily(f"deltaline_principal_{name}", text, labels=("principal",))
            for principal, number in _sums(names, numbers).items():
                counter.add_metric((principal,), number)
            yield counter


def _sums(names: Mapping[int, str], numbers: list[tuple[int, int]]) -> dict[str, int]:
    """Numbers by label: each name has one, and those that have none are together."""
    sums = dict.fromkeys(names.values(), 0)
    for principal, number in numbers:
        label = names.get(principal, OTHER)
        sums[label] = sums.get(label, 0) + number
    return sums
