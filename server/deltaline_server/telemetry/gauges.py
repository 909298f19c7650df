"""The metrics that are read at each scrape: how full the server is, and what must stand still while it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from deltaline_server.memory.regions import Regions
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.tables.adapter_registry import AdapterRegistry
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.sequences import SequenceTable
from deltaline_server.telemetry.metrics import Metrics
from deltaline_server.telemetry.prefix_metrics import PrefixMetrics
from deltaline_server.telemetry.principal_metrics import PrincipalMetrics
from deltaline_server.telemetry.tier_metrics import TierCounts, TierMetrics

Read = Callable[[], float]


class DeviceCounts(Protocol):
    """What must not grow while batches are served, and bytes of device memory; an executor counts them."""

    @property
    def compilations(self) -> int: ...
    @property
    def captures(self) -> int: ...
    @property
    def allocations(self) -> int: ...
    @property
    def bytes(self) -> int: ...


class FrontEnds(Protocol):
    """The processes that speak gRPC, where there are some."""

    num_restarts: int

    @property
    def pids(self) -> list[int]: ...
    @property
    def num_calls(self) -> int: ...
    @property
    def cpu_s(self) -> float: ...
    @property
    def memory_bytes(self) -> int: ...


class Tls(Protocol):
    """What protects the ports, where something does."""

    num_taken: int
    num_refused: int

    @property
    def expires_s(self) -> float: ...


class Principals(Protocol):
    """Who may call."""

    @property
    def names(self) -> Mapping[int, str]: ...
    @property
    def num_refused(self) -> int: ...


class Moves(Protocol):
    """What moves sequences to other servers."""

    num_moved: int
    num_failed: int
    bytes_ahead: int
    bytes_frozen: int
    ahead_s: float
    frozen_s: float


def add_gauges(
    metrics: Metrics,
    *,
    table: SequenceTable,
    snapshots: SnapshotTable,
    scheduler: Scheduler,
    regions: Regions,
    link_regions: Regions,
    link_connections: Callable[[], int],
    counts: Callable[[], DeviceCounts],
    adapters: AdapterRegistry | None,
    front_ends: FrontEnds,
    tls: Tls | None,
    principals: Principals,
    unknown_handles: Callable[[], int],
    tiers: Mapping[str, TierCounts],
    moves: Moves,
) -> None:
    """Let the metrics read these numbers. adapters, tls: None where the server has none. tiers: by name."""
    metrics.registry.register(PrincipalMetrics(lambda: principals.names, table, scheduler))
    _add_sequences(metrics, table, scheduler)
    _add_snapshots(metrics, table, snapshots, tiers)
    _add_callers(metrics, principals, unknown_handles)
    _add_ways_in(metrics, regions, link_regions, link_connections, front_ends)
    _add_adapters(metrics, table, scheduler, adapters)
    _add_tls(metrics, tls)
    _add_device(metrics, counts)
    _add_moves(metrics, moves)


def _gauges(metrics: Metrics, *gauges: tuple[str, str, Read]) -> None:
    """Add what rises and falls: names, texts, and what reads them."""
    for name, text, read in gauges:
        metrics.gauge(f"deltaline_{name}", text, read)


def _totals(metrics: Metrics, *totals: tuple[str, str, Read]) -> None:
    """Add what only rises, likewise."""
    for name, text, read in totals:
        metrics.total(f"deltaline_{name}", text, read)


def _add_sequences(metrics: Metrics, table: SequenceTable, scheduler: Scheduler) -> None:
    pages = table.pages
    _gauges(
        metrics,
        ("lines_used", "State lines in use.", lambda: table.num_lines_used),
        ("lines_capacity", "State lines in all, the null line not counted.", lambda: table.num_lines),
        ("kv_pages_used", "Pages of keys and values in use.", lambda: 0 if pages is None else pages.num_used),
        ("kv_pages_capacity", "Pages of keys and values in all.", lambda: 0 if pages is None else pages.num_pages),
        ("sequences_open", "Sequences open.", lambda: table.num_open),
        ("queue_rows", "Rows that wait or run.", lambda: scheduler.load().queued_rows),
        ("queue_bytes", "Bytes that wait or run.", lambda: scheduler.load().queued_bytes),
        ("reply_bytes", "Bytes of kept replies.", lambda: scheduler.load().reply_bytes),
    )
    _totals(metrics, ("sequences_expired", "Leases that ran out.", lambda: table.num_expired))


def _add_snapshots(
    metrics: Metrics, table: SequenceTable, snapshots: SnapshotTable, tiers: Mapping[str, TierCounts]
) -> None:
    metrics.registry.register(TierMetrics(tiers))
    metrics.registry.register(PrefixMetrics(snapshots))
    lines = table.lines
    _gauges(
        metrics,
        ("snapshots", "Snapshots that are held.", lambda: snapshots.num_held),
        ("snapshots_pinned", "Pinned ones of them.", lambda: snapshots.num_pinned),
        ("snapshot_lines_used", "Lines that nobody writes, in use.", lambda: lines.num_frozen),
        ("snapshot_lines_capacity", "Lines beside those of sequences.", lambda: lines.snapshot_lines),
    )
    _totals(
        metrics,
        ("snapshots_captured", "Snapshots made.", lambda: snapshots.num_captured),
        ("snapshots_restored", "Sequences that began with one.", lambda: snapshots.num_restored),
        ("snapshots_evicted", "Snapshots that gave way to others.", lambda: snapshots.num_evicted),
        ("snapshots_expired", "Leases of snapshots that ran out.", lambda: snapshots.num_expired),
    )


def _add_callers(metrics: Metrics, principals: Principals, unknown_handles: Callable[[], int]) -> None:
    _gauges(metrics, ("principals", "Principals that there are.", lambda: len(principals.names)))
    _totals(
        metrics,
        ("principals_refusals", "Changed files of principals that were wrong.", lambda: principals.num_refused),
        ("unknown_handles", "Handles that named nothing of their principal's.", unknown_handles),
    )


def _add_ways_in(
    metrics: Metrics,
    regions: Regions,
    link_regions: Regions,
    link_connections: Callable[[], int],
    front_ends: FrontEnds,
) -> None:
    _gauges(
        metrics,
        ("front_ends", "Front ends that serve.", lambda: len(front_ends.pids)),
        ("front_end_calls", "Calls in flight that came by front ends.", lambda: front_ends.num_calls),
        ("front_end_memory_bytes", "Host memory of front ends.", lambda: front_ends.memory_bytes),
        ("shared_memory_bytes", "Bytes of shared memory.", lambda: regions.used_bytes),
        ("link_connections", "Connections of the local link.", link_connections),
        ("link_memory_bytes", "Bytes of link memory.", lambda: link_regions.used_bytes),
    )
    _totals(
        metrics,
        ("front_end_cpu_seconds", "Processor time of front ends.", lambda: front_ends.cpu_s),
        ("front_end_restarts", "Front ends that ended and were started again.", lambda: front_ends.num_restarts),
    )


def _add_adapters(
    metrics: Metrics, table: SequenceTable, scheduler: Scheduler, adapters: AdapterRegistry | None
) -> None:
    def of(read: Callable[[AdapterRegistry], float]) -> Read:
        """0 where the server keeps no adapters."""
        return lambda: 0.0 if adapters is None else read(adapters)

    _gauges(
        metrics,
        ("adapters_registered", "Adapters in host memory.", of(lambda a: a.num_registered)),
        ("adapters_resident", "Adapters on the device.", of(lambda a: a.places.num_resident)),
        ("adapter_bytes", "Host memory of adapters.", of(lambda a: a.used_bytes)),
        ("adapter_sequences", "Sequences open that have an adapter.", lambda: table.adapters.num_bound),
        ("adapter_rows_waiting", "Rows that wait for their adapter.", lambda: scheduler.adapter_wait.num_waiting),
    )
    _totals(
        metrics,
        ("adapter_loads", "Adapters loaded.", of(lambda a: a.num_loaded)),
        ("adapter_load_seconds", "Time that these loads took.", of(lambda a: a.load_s)),
        ("adapter_evictions", "Adapters that made way in host memory.", of(lambda a: a.num_evicted)),
        ("adapter_slot_copies", "Copies of adapters to the device.", of(lambda a: a.places.num_copies)),
        ("adapter_slot_evictions", "Adapters that made way in slots.", of(lambda a: a.places.num_evicted)),
    )


def _add_tls(metrics: Metrics, tls: Tls | None) -> None:
    def of(read: Callable[[Tls], float]) -> Read:
        """0 where the server speaks no TLS."""
        return lambda: 0.0 if tls is None else read(tls)

    _gauges(
        metrics,
        ("tls_expires_seconds", "When the certificate expires, since the epoch.", of(lambda t: t.expires_s)),
    )
    _totals(
        metrics,
        ("tls_reloads", "Certificates that changed and were taken.", of(lambda t: t.num_taken)),
        ("tls_refusals", "Certificates that changed and can't be used.", of(lambda t: t.num_refused)),
    )


def _add_device(metrics: Metrics, counts: Callable[[], DeviceCounts]) -> None:
    _gauges(metrics, ("device_bytes", "Device memory that tensors are given from.", lambda: counts().bytes))
    _totals(
        metrics,
        ("compilations", "Kernels compiled, or loaded once compiled.", lambda: counts().compilations),
        ("graph_captures", "CUDA graphs captured.", lambda: counts().captures),
        ("device_allocations", "Allocations of device memory.", lambda: counts().allocations),
    )


def _add_moves(metrics: Metrics, moves: Moves) -> None:
    _totals(
        metrics,
        ("sequences_moved", "Sequences that were moved to other servers.", lambda: moves.num_moved),
        ("moves_failed", "Moves that failed; the sequence stayed.", lambda: moves.num_failed),
        ("moved_bytes_ahead", "Sent of moved sequences while they were stepped.", lambda: moves.bytes_ahead),
        ("moved_bytes_frozen", "Sent of moved sequences while they stood still.", lambda: moves.bytes_frozen),
        ("moved_ahead_seconds", "How long pages of moved sequences went ahead.", lambda: moves.ahead_s),
        ("moved_frozen_seconds", "How long moved sequences stood still.", lambda: moves.frozen_s),
    )
