"""Prometheus metrics: their names, labels and buckets.

Everything but the gauges is updated on the event loop; the gauges are read when scraped. No label names a sequence or a
client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

import grpc
import prometheus_client
from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaline_server.errors import Reason
from deltaline_server.scheduling.observer import BatchTiming
from deltaline_server.step import RowKind
from deltaline_server.telemetry.tallies import Spreads, Tallies, Tally

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

    def __init__(self, families: RpcFamilies, *labels: str) -> None:
        self.started = families.started.add(*labels)
        self.received = families.received.add(*labels)
        self.sent = families.sent.add(*labels)
        self.seconds = families.seconds.add(*labels)
        self.handled = {code: families.handled.add(*labels, _code_name(code)) for code in grpc.StatusCode}


class RpcFamilies:
    """The metric families that all methods share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self.started = Tallies(registry, "grpc_server_started", "RPCs started.", labels)
        self.handled = Tallies(registry, "grpc_server_handled", "RPCs completed.", (*labels, "grpc_code"))
        self.received = Tallies(registry, "grpc_server_msg_received", "Messages received.", labels)
        self.sent = Tallies(registry, "grpc_server_msg_sent", "Messages sent.", labels)
        self.seconds = Spreads(
            registry, "grpc_server_handling_seconds", "Time to complete an RPC.", SECONDS_BUCKETS, labels
        )


class Metrics:
    """All metrics of one server, in a registry of its own. Implements the scheduler's Observer."""

    def __init__(self, services: Sequence[ServiceDescriptor]) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        families = RpcFamilies(self.registry)
        self.rpcs = {
            f"/{service.full_name}/{method.name}": RpcMetrics(
                families, _call_type(method.client_streaming, method.server_streaming), service.full_name, method.name
            )
            for service in services
            for method in service.methods
        }
        stages = Spreads(
            self.registry,
            "deltaline_stage_seconds",
            "Time of rows in the queue, and of the batches that hold rows of a kind in each later stage.",
            SECONDS_BUCKETS,
            ("stage", "kind"),
        )
        self._stages = {kind: [stages.add(stage, kind.name.lower()) for stage in STAGES] for kind in RowKind}
        self._busy = self._tally(
            "deltaline_device_busy_seconds",
            "Time in which the engine had at least one batch; its rate is the device's busy share.",
        )
        self._batch_rows = Spreads(self.registry, "deltaline_batch_rows", "Rows of a batch.", ROWS_BUCKETS).add()
        self._batch_tokens = Spreads(
            self.registry, "deltaline_batch_tokens", "Tokens of a batch.", TOKENS_BUCKETS
        ).add()
        steps = Tallies(self.registry, "deltaline_steps", "Rows answered.", ("outcome",))
        self._steps = {outcome: steps.add(outcome) for outcome in OUTCOMES}
        refused = Tallies(self.registry, "deltaline_refused", "Rows and requests refused.", ("reason",))
        self._refused = {reason: refused.add(reason.name) for reason in Reason}
        self._drafts = self._tally("deltaline_draft_tokens", "Tokens of VERIFY rows.")
        self._accepted = self._tally(
            "deltaline_draft_tokens_accepted",
            "Accepted tokens of VERIFY rows, counted when the step that folds them in begins.",
        )
        rows = Tallies(
            self.registry,
            "deltaline_adapter_rows",
            "Rows with an adapter, by the adapters in their batch, rounded up to a power of two; 256 is also more.",
            ("adapters",),
        )
        self._adapter_rows = [rows.add(str(count)) for count in ADAPTER_COUNTS]

    def batch_done(self, timing: BatchTiming) -> None:
        """Count a batch. The stages after the queue count once for each kind that the batch holds."""
        self._busy.value += timing.busy_s
        self._batch_rows.observe(sum(timing.num_of_kind.values()))
        self._batch_tokens.observe(timing.num_tokens)
        if timing.num_adapters:
            place = min(bisect_left(ADAPTER_COUNTS, timing.num_adapters), len(ADAPTER_COUNTS) - 1)
            self._adapter_rows[place].value += timing.num_adapter_rows
        for kind, count, waited_s in timing.queued:
            self._stages[kind][0].observe(waited_s, count)
        for kind, count in timing.num_of_kind.items():
            if count:
                _, copy_in, compute, copy_out = self._stages[kind]
                copy_in.observe(timing.copy_in_s)
                compute.observe(timing.compute_s)
                copy_out.observe(timing.copy_out_s)

    def steps(self, outcome: str, count: int) -> None:
        """Count rows answered: "executed", "replayed" or "joined"."""
        self._steps[outcome].value += count

    def refused(self, reason: Reason, count: int) -> None:
        """Count rows, or whole requests, that were refused."""
        self._refused[reason].value += count

    def drafts(self, sent: int) -> None:
        """Count tokens of VERIFY rows."""
        self._drafts.value += sent

    def accepted(self, count: int) -> None:
        """Count accepted tokens of VERIFY rows that a step begins to fold into their states."""
        self._accepted.value += count

    def gauge(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape, on the scraper's thread."""
        Gauge(name, documentation, registry=self.registry).set_function(read)

    def total(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Add a counter that something else keeps; read at each scrape, on the scraper's thread."""
        self.registry.register(_Total(name, documentation, read))

    def build_info(self, labels: Mapping[str, str]) -> None:
        """Add what the server was built and runs with: a gauge that is 1, with these labels."""
        Info("deltaline_build", "Versions and device of the server.", registry=self.registry).info(dict(labels))

    def _tally(self, name: str, documentation: str) -> Tally:
        """A counter without labels."""
        return Tallies(self.registry, name, documentation).add()


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
