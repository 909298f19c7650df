"""Metrics by principal: bounded labels, and every number under its own."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from rigs.scheduler_rig import DECODE, Rig

from deltaline_server.principal import Principal
from deltaline_server.telemetry import principal_metrics
from deltaline_server.telemetry.principal_metrics import PrincipalMetrics


async def test_each_principal_has_its_numbers_and_those_without_a_label_are_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(principal_metrics, "MAX_LABELS", 3)
    rig, registry = Rig(slots=32, eager=False), CollectorRegistry()
    names = {number: f"p{number}" for number in range(5)}
    registry.register(PrincipalMetrics(lambda: names, rig.table, rig.scheduler))
    futures = []
    for number in (1, 2, 3, 4, 7):
        handles = rig.table.open(number, principal=Principal(number, "")).handles.tolist()
        rows = [(handle, DECODE, 1, 0, -1, [1.0]) for handle in handles]
        futures.append(rig.submit(rig.request(*rows[:2], principal=Principal(number, ""))))

    def found(name: str) -> list[float | None]:
        labels = ("p0", "p1", "p2", "other", "p3")
        return [registry.get_sample_value(f"deltaline_principal_{name}", {"principal": label}) for label in labels]

    assert found("sequences") == [0, 1, 2, 14, None]
    assert found("queue_rows") == [0, 1, 2, 6, None]
    while not all(future.done() for future in futures):
        await asyncio.sleep(0)
        if rig.engine.waiting:
            rig.engine.run()
    rig.scheduler.settle()
    assert found("rows_total") == found("tokens_total") == [0, 1, 2, 6, None]
    assert found("queue_rows") == [0, 0, 0, 0, None]
