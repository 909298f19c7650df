"""A real Prometheus scrapes a live server while it works: every query of the dashboards gets data, and no rule fails.

That no alert fires beside a healthy server is promtool's to show: here it would depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rigs.dashboards import ROOT, queries
from rigs.scraper import Prometheus, program, scraping
from rigs.small_models import HIDDEN

from deltaline_client import AsyncClient, Row
from deltaline_server.app import Server

KINDS = ("decode", "prefill", "verify")


@pytest.mark.timeout(400)
async def test_every_query_gets_data_from_a_server_at_work(live: Server, tmp_path: Path) -> None:
    program("prometheus")
    with scraping(f"127.0.0.1:{live.metrics_port}", tmp_path) as prometheus:
        # An adapter that is loaded before counts for nothing in a rate.
        await asyncio.to_thread(prometheus.wait_for, "count_over_time(deltaline_adapter_loads_total[1m])", 2)
        steps = asyncio.create_task(work(live, tmp_path / "french"))
        missing = await asyncio.to_thread(prometheus.ask_until_none, what_is_missing)
        steps.cancel()
        assert missing == []


async def work(live: Server, adapter: Path) -> None:
    """Make prefills, decodes and verifies, with an adapter and without, until cancelled."""
    make = [sys.executable, "-P", str(ROOT / "examples" / "make_adapter.py"), str(live.config.model), str(adapter)]
    await asyncio.to_thread(subprocess.run, make, check=True, capture_output=True)
    rng = np.random.default_rng(1)
    async with AsyncClient(live.address) as client:
        await client.adapters.load("french", adapter)
        sequences = [await client.open(), await client.open(), await client.open(adapter="french")]
        while True:
            for row, length in ((Row.prefill, 17), (Row.decode, 1), (Row.verify, 3)):
                hidden = rng.standard_normal((3, length, HIDDEN), dtype=np.float32)
                await client.step([row(one, hidden[i]) for i, one in enumerate(sequences)])
            for one in sequences:
                await one.commit(2)
            await asyncio.sleep(0.05)


def what_is_missing(prometheus: Prometheus) -> list[str]:
    """The queries and recording rules without a value now, and the rules that fail."""
    asked = [
        (f"{query.board}, {query.panel}", query.filled(kind))
        for query in queries()
        for kind in (KINDS if "$kind" in query.expression else KINDS[:1])
    ]
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    # This model has no pages.
    asked += [("rule", name) for name in recorded if "kv_pages" not in name]
    empty = [f"{what}: {query}" for what, query in asked if not any(map(math.isfinite, prometheus.values(query)))]
    return empty + [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
