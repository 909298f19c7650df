"""A real Prometheus scrapes a live server while it works: every query of the dashboards has data, no rule fails, and no
alert fires."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

from rigs.dashboards import queries
from rigs.scraper import Prometheus, program, scraping

from deltaline_server.app import Server

DEMO_S = 6.0
KINDS = ("decode", "prefill", "verify")
# Of a machine that does nothing else they say what is so: a small CPU under a demo is busy.
OF_LOAD = {"DeltalineDeviceSaturated", "DeltalineDecodesWait"}


async def test_every_query_has_data_after_a_demo_and_no_alert_fires(
    live: Server, demo: Callable[[float], Awaitable[None]], tmp_path: Path
) -> None:
    program("prometheus")
    with scraping(f"127.0.0.1:{live.metrics_port}", tmp_path) as prometheus:
        await asyncio.to_thread(prometheus.wait_for, 'up{job="deltaline"}', 1)
        await asyncio.to_thread(prometheus.wait_for, "count_over_time(deltaline_adapter_loads_total[1m])", 2)
        await demo(DEMO_S)
        await asyncio.to_thread(prometheus.wait_for, "deltaline_adapter_loads_total", 1)
        await asyncio.to_thread(check, prometheus)


def check(prometheus: Prometheus) -> None:
    """What Prometheus knows now."""
    empty = []
    for query in queries():
        for kind in KINDS if "$kind" in query.expression else KINDS[:1]:
            if not any(map(math.isfinite, prometheus.values(query.filled(kind)))):
                empty.append(f"{query.board}, {query.panel}: {query.filled(kind)}")
    assert empty == []
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    broken = {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"}
    alerts = {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}
    loud = {name for name, state in alerts.items() if state != "inactive"}
    assert len(alerts) > 10 and broken == {} and loud <= OF_LOAD
    for rule in rules:
        if rule["type"] == "recording" and "kv_pages" not in rule["name"]:  # this model has none
            assert prometheus.values(rule["name"]), f"{rule['name']} has no data"
