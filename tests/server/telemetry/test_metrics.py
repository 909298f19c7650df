"""The metrics are there from the start, count what happens, and are scraped over HTTP."""

from __future__ import annotations

import asyncio
import platform
import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from rigs.scraper import scrape

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server import __version__
from deltaline_server.app import Server
from deltaline_server.scheduling.observer import BatchTiming
from deltaline_server.step import RowKind
from deltaline_server.tables.prefixes.cost import Tier
from deltaline_server.tables.prefixes.index import Miss
from deltaline_server.telemetry.gauges import add_gauges
from deltaline_server.telemetry.metrics import SECONDS_BUCKETS, Metrics
from deltaline_server.telemetry.tallies import Spreads

SERVICE = pb.DESCRIPTOR.services_by_name["LayerService"]
HIDDEN = 32
# In the order of the numbers that stand for them.
NUMBERED = """
    adapters_resident adapter_slot_copies_total adapter_slot_evictions_total adapters_registered adapter_bytes
    adapter_loads_total adapter_load_seconds_total adapter_evictions_total kv_pages_used kv_pages_capacity
    adapter_sequences lines_used lines_capacity sequences_open sequences_expired_total queue_rows queue_bytes
    reply_bytes adapter_rows_waiting shared_memory_bytes compilations_total graph_captures_total
    device_allocations_total device_bytes link_connections link_memory_bytes
    front_ends front_end_calls front_end_restarts_total front_end_cpu_seconds_total
    front_end_memory_bytes
    tls_expires_seconds tls_reloads_total tls_refusals_total
    principals principals_refusals_total unknown_handles_total
    snapshots snapshots_pinned snapshot_lines_used snapshot_lines_capacity
    snapshots_captured_total snapshots_restored_total snapshots_evicted_total snapshots_expired_total
    sequences_moved_total moves_failed_total
    moved_bytes_ahead_total moved_bytes_frozen_total moved_ahead_seconds_total moved_frozen_seconds_total
"""


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_methods_are_zero_before_they_are_called() -> None:
    metrics = Metrics([SERVICE])
    for name in ("Step", "StepStream"):
        kind = "bidi_stream" if name == "StepStream" else "unary"
        labels = {"grpc_type": kind, "grpc_service": "deltaline.v1.LayerService", "grpc_method": name}
        assert sample(metrics, "grpc_server_started_total", **labels) == 0
        assert sample(metrics, "grpc_server_msg_received_total", **labels) == 0
        assert sample(metrics, "grpc_server_handling_seconds_count", **labels) == 0
        for code in ("OK", "InvalidArgument", "Canceled", "Internal"):
            assert sample(metrics, "grpc_server_handled_total", **labels, grpc_code=code) == 0


@pytest.mark.parametrize("seconds", [0.0, 50e-6, 51e-6, 0.003, 10.0, 11.0])
def test_observation_is_in_every_bucket_from_its_own_up(seconds: float) -> None:
    stages = Spreads(CollectorRegistry(), "stage_seconds", "Time.", SECONDS_BUCKETS, ("kind",))
    stages.add("prefill")
    stages.add("decode").observe(seconds, count=3)
    [family] = stages.collect()
    samples = [s for s in family.samples if s.labels["kind"] == "decode"]
    found = {s.labels["le"]: s.value for s in samples if s.name == "stage_seconds_bucket"}
    assert found == {str(bound): 3.0 * (seconds <= bound) for bound in SECONDS_BUCKETS} | {"+Inf": 3.0}
    assert [s.value for s in samples if s.name == "stage_seconds_count"] == [3]
    assert [s.value for s in samples if s.name == "stage_seconds_sum"] == [3 * seconds]


def test_batch_counts_each_kind_that_it_holds() -> None:
    metrics = Metrics([])
    num_of_kind = {RowKind.DECODE: 2, RowKind.PREFILL: 1, RowKind.VERIFY: 0}
    queued = [(RowKind.DECODE, 1, 0.1), (RowKind.DECODE, 1, 0.2)]
    metrics.batch_done(BatchTiming(num_of_kind, 70, queued, 1e-3, 2e-3, 3e-3, busy_s=7e-3))
    metrics.batch_done(BatchTiming({RowKind.PREFILL: 1}, 1, [], 1e-3, 2e-3, 3e-3, busy_s=1e-3))
    assert sample(metrics, "deltaline_device_busy_seconds_total") == pytest.approx(8e-3)
    count, total = "deltaline_stage_seconds_count", "deltaline_stage_seconds_sum"
    assert sample(metrics, count, stage="queue", kind="decode") == 2
    assert sample(metrics, total, stage="queue", kind="decode") == pytest.approx(0.3)
    assert sample(metrics, count, stage="queue", kind="prefill") == 0
    assert sample(metrics, count, stage="compute", kind="prefill") == 2
    assert sample(metrics, total, stage="copy_out", kind="decode") == pytest.approx(3e-3)
    assert sample(metrics, count, stage="compute", kind="verify") == 0
    assert sample(metrics, "deltaline_batch_rows_sum") == 4
    assert sample(metrics, "deltaline_batch_tokens_sum") == 71


@pytest.mark.parametrize(("num_adapters", "label"), [(1, "1"), (5, "8"), (8, "8"), (256, "256"), (1000, "256")])
def test_rows_with_adapters_are_counted_by_how_many_their_batch_had(num_adapters: int, label: str) -> None:
    metrics = Metrics([])
    metrics.batch_done(BatchTiming({RowKind.DECODE: 9}, 9, [], 0, 0, 0, 0))
    timing = BatchTiming({RowKind.DECODE: 1001}, 1001, [], 0, 0, 0, 0, num_adapter_rows=1000, num_adapters=num_adapters)
    metrics.batch_done(timing)
    counts = {bound: sample(metrics, "deltaline_adapter_rows_total", adapters=str(2**bound)) for bound in range(9)}
    assert {str(2**bound): count for bound, count in counts.items() if count} == {label: 1000}


def test_every_gauge_and_total_reads_its_own_number() -> None:
    metrics = Metrics([])
    places = SimpleNamespace(num_resident=1, num_copies=2, num_evicted=3)
    adapters: Any = SimpleNamespace(
        num_registered=4, used_bytes=5, num_loaded=6, load_s=7, num_evicted=8, places=places
    )
    pages, bound = SimpleNamespace(num_used=9, num_pages=10), SimpleNamespace(num_bound=11)
    table: Any = SimpleNamespace(
        num_lines_used=12, num_lines=13, pages=pages, num_open=14, num_expired=15, adapters=bound, num_open_of={}
    )
    table.lines = SimpleNamespace(num_frozen=40, snapshot_lines=41)
    snapshots: Any = SimpleNamespace(
        num_held=38,
        num_pinned=39,
        num_captured=42,
        num_restored=43,
        num_evicted=44,
        num_expired=45,
        hits=Counter({Tier.DEVICE: 46}),
        misses=Counter({Miss.EVICTED: 47, None: 48}),
    )
    load = SimpleNamespace(queued_rows=16, queued_bytes=17, reply_bytes=18)
    scheduler: Any = SimpleNamespace(use={}, load=lambda: load, adapter_wait=SimpleNamespace(num_waiting=19))
    regions: Any = SimpleNamespace(used_bytes=20)
    counts: Any = SimpleNamespace(compilations=21, captures=22, allocations=23, bytes=24)
    add_gauges(
        metrics,
        table=table,
        snapshots=snapshots,
        scheduler=scheduler,
        regions=regions,
        link_regions=SimpleNamespace(used_bytes=26),  # type: ignore[arg-type]
        link_connections=lambda: 25,
        counts=lambda: counts,
        adapters=adapters,
        front_ends=SimpleNamespace(pids=range(27), num_calls=28, num_restarts=29, cpu_s=30, memory_bytes=31),
        tls=SimpleNamespace(expires_s=32, num_taken=33, num_refused=34),
        principals=SimpleNamespace(names=dict.fromkeys(range(35), "a"), num_refused=36),
        unknown_handles=lambda: 37,
        tiers={},
        moves=SimpleNamespace(num_moved=46, num_failed=47, bytes_ahead=48, bytes_frozen=49, ahead_s=50, frozen_s=51),
    )
    names = re.findall(r"\w+", NUMBERED)
    read = {name: sample(metrics, f"deltaline_{name}") for name in names}
    assert read == {name: number for number, name in enumerate(names, start=1)}
    hits = {tier: sample(metrics, "deltaline_prefix_hits_total", tier=tier) for tier in ("DEVICE", "HOST", "FILE")}
    assert hits == {"DEVICE": 46, "HOST": 0, "FILE": 0}
    reasons = ("EVICTED", "CHEAPER_TO_COMPUTE", "NEVER_STORED", "TOO_SHORT", "OTHER_ADAPTER", "OTHER_FINGERPRINT")
    misses = [sample(metrics, "deltaline_prefix_misses_total", reason=reason) for reason in reasons]
    assert misses == [47, 48, 0, 0, 0, 0]


async def samples_of(server: Server) -> dict[str, float]:
    """The samples of a server, keyed by name and label values, in the order of the labels' names."""
    families = text_string_to_metric_families(await asyncio.to_thread(scrape, server))
    return {
        "|".join([s.name, *(s.labels[label] for label in sorted(s.labels))]): s.value
        for family in families
        for s in family.samples
    }


async def test_counters_move_with_the_calls(make_server: Callable[..., Server]) -> None:
    async with make_server(metrics_port=0) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        before = await samples_of(server)
        opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=2))
        step = pb.StepRequest(
            server_epoch=opened.server_epoch,
            sequence=opened.sequence,
            kind=[pb.ROW_KIND_PREFILL, pb.ROW_KIND_VERIFY],
            step=[1, 1],
            position=[0, 0],
            query_start_loc=[0, 5, 8],
            hidden=wire.encode(np.ones((8, HIDDEN), np.float32)),
        )
        await stub.Step(step)
        await stub.Step(step)
        step.server_epoch = 0
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Step(step)
        after = await samples_of(server)
    step_rpc = "Step|deltaline.v1.LayerService|unary"
    moved = {name: value - before[name] for name, value in after.items() if value != before[name]}
    expected = {
        f"grpc_server_started_total|{step_rpc}": 3,
        f"grpc_server_handled_total|OK|{step_rpc}": 2,
        f"grpc_server_handled_total|InvalidArgument|{step_rpc}": 1,
        f"grpc_server_msg_received_total|{step_rpc}": 3,
        f"grpc_server_msg_sent_total|{step_rpc}": 2,
        f"grpc_server_handling_seconds_count|{step_rpc}": 3,
        "deltaline_steps_total|executed": 2,
        "deltaline_steps_total|replayed": 2,
        "deltaline_refused_total|INVALID_REQUEST": 1,
        "deltaline_draft_tokens_total": 3,
        "deltaline_lines_used": 2,
        "deltaline_sequences_open": 2,
        "deltaline_stage_seconds_count|prefill|queue": 1,
        "deltaline_stage_seconds_count|verify|compute": 1,
        "deltaline_batch_tokens_sum": 8,
    }
    assert {name: moved.get(name) for name in expected} == expected
    assert after["deltaline_lines_capacity"] == 8
    assert after["process_resident_memory_bytes"] > 1 << 20
    [built] = [name for name in after if name.startswith("deltaline_build_info|")]
    assert {"cpu", __version__, platform.python_version(), torch.__version__} <= set(built.split("|"))
