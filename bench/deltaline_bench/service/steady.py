"""Part `steady`: steps of random rows, kinds and lengths; nothing compiles, is captured or allocated."""

from __future__ import annotations

from deltaline_bench.service import memory
from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host
from deltaline_bench.service.random_steps import Walk
from deltaline_bench.service.size import Size
from deltaline_client import AsyncClient

PART = "steady"


async def measure(host: Host) -> list[Figure]:
    """Step, and read the metrics before and after."""
    size, before = host.size, host.metrics()
    async with AsyncClient(host.address) as client:
        walk = Walk(client, await client.info(), size.steady_sequences, size.steady_tokens, seed=0)
        walked = await walk.run(size.steady_steps)
    return judge(size, walked.rows.total(), before, host.metrics())


def judge(size: Size, rows: int, before: dict[str, float], after: dict[str, float]) -> list[Figure]:
    """Make the figures of two pages of metrics."""
    figures = [
        Figure(PART, "rows of random kinds and lengths", rows, "rows", "client", note=f"{size.steady_steps} steps")
    ]
    for what, (metric, grown) in memory.growths(before, after).items():
        unit = "bytes" if metric == memory.DEVICE_BYTES else ""
        note = memory.missing(metric) if grown is None else ""
        figures.append(Figure(PART, what, grown, unit, "metrics", size.bar(0.0), note))
    return figures
