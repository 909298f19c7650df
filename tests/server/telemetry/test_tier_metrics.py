"""Metrics of the tiers: every number under its own name and labels."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from deltaline_server.telemetry.tier_metrics import TierMetrics


def test_every_tier_has_its_numbers() -> None:
    tiers: dict[str, Any] = {}
    for first, name in ((1, "host"), (11, "file")):
        fields = ("used_bytes", "limit_bytes", "num_stored", "num_loaded", "num_evicted")
        numbers = {field: first + i for i, field in enumerate(fields)}
        tiers[name] = SimpleNamespace(**numbers, num_missed=Counter(full=first + 5))
    registry = CollectorRegistry()
    registry.register(TierMetrics(tiers))
    names = "state_tier_used_bytes", "state_tier_limit_bytes"
    totals = "states_stored_total", "states_loaded_total", "states_evicted_total"
    for first, tier in ((1, "host"), (11, "file")):
        read = [registry.get_sample_value(f"deltaline_{name}", {"tier": tier}) for name in (*names, *totals)]
        assert read == list(range(first, first + 5))
        labels = {"tier": tier, "reason": "full"}
        assert registry.get_sample_value("deltaline_state_misses_total", labels) == first + 5
