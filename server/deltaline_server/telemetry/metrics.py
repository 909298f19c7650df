"""Prometheus metrics: their names, labels and buckets.

Everything but the gauges is updated on the event loop; the gauges are read when scraped. No label names a sequence or a
client.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

import grpc
import prometheus_client
from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaline_server.errors import Reason
from deltaline_server.scheduling.observer import BatchTiming
from deltaline_server.step import RowKind

# A decode step takes well under a millisecond on a GPU: prometheus' own buckets begin at 5 ms.
SECONDS_BUCKETS = (
    50e-6,
    100e-6,
    200e-6,
    500e-6,
    1e-3,
    2e-3,
    5e-3,
    1e-2,
    2e-2,
    5e-2,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
)
ROWS_BUCKETS = tuple(float(2**i) for i in range(11))
TOKENS_BUCKETS = tuple(float(2**i) for i in range(15))
STAGES = ("queue", "copy_in", "compute", "copy_out")
# How many different adapters a batch has, at most; a batch with more counts with the last.
ADAPTER_COUNTS = tuple(2**i for i in range(9))
OUTCOMES = ("executed", "replayed", "joined")


class RpcMetrics:
    """The metrics of one method, with the names and label values of go-grpc-prometheus."""

    def __init__(self, families: RpcFamilies, labels: tuple[str, str, str]) -> None:
        self.started = families.started.labels(*labels)
        self.received = families.received.labels(*labels)
        self.sent = families.sent.labels(*labels)
        self.seconds = families.seconds.labels(*labels)
        self.handled = {code: families.handled.labels(*labels, _code_name(code)) for code in grpc.StatusCode}


class RpcFamilies:
    """The metric families that all methods share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self.started = Counter("grpc_server_started", "RPCs started.", labels, registry=registry)
        self.handled = Counter("grpc_server_handled", "RPCs completed.", (*labels, "grpc_code"), registry=registry)
        self.received = Counter("grpc_server_msg_received", "Messages received.", labels, registry=registry)
        self.sent = Counter("grpc_server_msg_sent", "Messages sent.", labels, registry=registry)
        self.seconds = Histogram(
            "grpc_server_handling_seconds",
            "Time to complete an RPC.",
            labels,
            registry=registry,
            buckets=SECONDS_BUCKETS,
        )


class StageSeconds(Collector):
    """A histogram by stage and row kind that takes many rows at once: a batch of 64 costs as much as one of 1."""

    def __init__(self) -> None:
        self._counts = {(s, k): [0] * (len(SECONDS_BUCKETS) + 1) for s in STAGES for k in RowKind}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def observe(self, stage: str, kind: RowKind, seconds: float, count: int = 1) -> None:
        """Add `count` observations of so many seconds."""
        self._counts[stage, kind][bisect_left(SECONDS_BUCKETS, seconds)] += count
        self._sums[stage, kind] += seconds * count

    def collect(self) -> Iterator[Metric]:
        """Yield the family; called by the registry."""
        family = HistogramMetricFamily(
            "deltaline_stage_seconds",
            "Time of rows in the queue, and of the batches that hold rows of a kind in each later stage.",
            labels=("stage", "kind"),
        )
        bounds = [*map(str, SECONDS_BUCKETS), "+Inf"]
        for (stage, kind), counts in self._counts.items():
            cumulative = list(itertools.accumulate(counts))
            buckets = list(zip(bounds, cumulative, strict=True))
            family.add_metric((stage, kind.name.lower()), buckets, self._sums[stage, kind])
        yield family


class Metrics:
    """All metrics of one server, in a registry of its own. Implements the scheduler's Observer."""

    def __init__(self, services: Sequence[ServiceDescriptor]) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        families = RpcFamilies(self.registry)
        self.rpcs = {
            f"/{service.full_name}/{method.name}": RpcMetrics(
                families, (_call_type(method.client_streaming, method.server_streaming), service.full_name, method.name)
            )
            for service in services
            for method in service.methods
        }
        self._stages = StageSeconds()
        self.registry.register(self._stages)
        self._busy = Counter(
            "deltaline_device_busy_seconds",
            "Time in which the engine had at least one batch; its rate is the device's busy share.",
            registry=self.registry,
        )
        self._batch_rows = self._histogram("deltaline_batch_rows", "Rows of a batch.", ROWS_BUCKETS)
        self._batch_tokens = self._histogram("deltaline_batch_tokens", "Tokens of a batch.", TOKENS_BUCKETS)
        steps = Counter("deltaline_steps", "Rows answered.", ("outcome",), registry=self.registry)
        self._steps = {outcome: steps.labels(outcome) for outcome in OUTCOMES}
        refused = Counter("deltaline_refused", "Rows and requests refused.", ("reason",), registry=self.registry)
        self._refused = {reason: refused.labels(reason.name) for reason in Reason}
        self._drafts = Counter("deltaline_draft_tokens", "Tokens of VERIFY rows.", registry=self.registry)
        self._accepted = Counter(
            "deltaline_draft_tokens_accepted",
            "Accepted tokens of VERIFY rows, counted when the step that folds them in begins.",
            registry=self.registry,
        )
        rows = Counter(
            "deltaline_adapter_rows",
            "Rows with an adapter, by the adapters in their batch, rounded up to a power of two; 256 is also more.",
            ("adapters",),
            registry=self.registry,
        )
        self._adapter_rows = [rows.labels(str(count)) for count in ADAPTER_COUNTS]

    def batch_done(self, timing: BatchTiming) -> None:
        """Count a batch. The stages after the queue count once for each kind that the batch holds."""
        stages = self._stages
        self._busy.inc(timing.busy_s)
        self._batch_rows.observe(sum(timing.num_of_kind.values()))
        self._batch_tokens.observe(timing.num_tokens)
        if timing.num_adapters:
            place = min(bisect_left(ADAPTER_COUNTS, timing.num_adapters), len(ADAPTER_COUNTS) - 1)
            self._adapter_rows[place].inc(timing.num_adapter_rows)
        for kind, count, waited_s in timing.queued:
            stages.observe("queue", kind, waited_s, count)
        for kind, count in timing.num_of_kind.items():
            if count:
                stages.observe("copy_in", kind, timing.copy_in_s)
                stages.observe("compute", kind, timing.compute_s)
                stages.observe("copy_out", kind, timing.copy_out_s)

    def steps(self, outcome: str, count: int) -> None:
        """Count rows answered: "executed", "replayed" or "joined"."""
        self._steps[outcome].inc(count)

    def refused(self, reason: Reason, count: int) -> None:
        """Count rows, or whole requests, that were refused."""
        self._refused[reason].inc(count)

    def drafts(self, sent: int) -> None:
        """Count tokens of VERIFY rows."""
        self._drafts.inc(sent)

    def accepted(self, count: int) -> None:
        """Count accepted tokens of VERIFY rows that a step begins to fold into their states."""
        self._accepted.inc(count)

    def gauge(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape, on the scraper's thread."""
        Gauge(name, documentation, registry=self.registry).set_function(read)

    def total(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Add a counter that something else keeps; read at each scrape, on the scraper's thread."""
        self.registry.register(_Total(name, documentation, read))

    def build_info(self, labels: Mapping[str, str]) -> None:
        """Add what the server was built and runs with: a gauge that is 1, with these labels."""
        Info("deltaline_build", "Versions and device of the server.", registry=self.registry).info(dict(labels))

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, registry=self.registry, buckets=buckets)


class _Total(Collector):
    """A counter whose value is read when scraped."""

    def __init__(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        self._name, self._documentation, self._read = name, documentation, read

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, value=self._read())


def _code_name(code: grpc.StatusCode) -> str:
    """The name of a code as Go writes it, for example "InvalidArgument"."""
    if code is grpc.StatusCode.OK:
        return "OK"
    return "Canceled" if code is grpc.StatusCode.CANCELLED else code.name.title().replace("_", "")


def _call_type(client_streaming: bool, server_streaming: bool) -> str:
    """The kind of call as go-grpc-prometheus writes it."""
    names = {(False, False): "unary", (True, False): "client_stream", (False, True): "server_stream"}
    return names.get((client_streaming, server_streaming), "bidi_stream")
