"""Part `steady`: steps of random rows, kinds and lengths; nothing compiles, is captured or allocated."""

from __future__ import annotations

import numpy as np

from deltaline_bench.service import memory
from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host
from deltaline_bench.service.size import Size
from deltaline_client import AsyncClient, Row

PART = "steady"


async def measure(host: Host) -> list[Figure]:
    """Step, and read the metrics before and after."""
    before = host.metrics()
    rows = await _steps(host)
    return judge(host.size, rows, before, host.metrics())


def judge(size: Size, rows: int, before: dict[str, float], after: dict[str, float]) -> list[Figure]:
    """Make the figures of two pages of metrics."""
    nothing = size.bar(0.0)
    figures = [
        Figure(PART, "rows of random kinds and lengths", rows, "rows", "client", note=f"{size.steady_steps} steps")
    ]
    for name, metric in (
        ("compilations", memory.COMPILATIONS),
        ("graph captures", memory.CAPTURES),
        ("device allocations", memory.ALLOCATIONS),
    ):
        grown = memory.growth(before, after, metric)
        figures.append(
            Figure(PART, name, grown, "", "metrics", nothing, memory.missing(metric) if grown is None else "")
        )
    held, holds = memory.device_bytes(before), memory.device_bytes(after)
    if held is None or holds is None:
        note = memory.missing("gauge deltaline_device_*bytes")
        return [*figures, Figure(PART, "device memory, growth", None, "bytes", "metrics", nothing, note)]
    return [*figures, Figure(PART, "device memory, growth", holds - held, "bytes", "metrics", nothing)]


async def _steps(host: Host) -> int:
    """Make the steps; return how many rows they had."""
    size, rng, num_rows = host.size, np.random.default_rng(0), 0
    async with AsyncClient(host.address) as client:
        info = await client.info()
        block = rng.standard_normal((size.steady_tokens, size.hidden), dtype=np.float32).astype(info.dtype)
        sequences = await client.open_many(size.steady_sequences)
        for _ in range(size.steady_steps):
            count = int(rng.integers(1, len(sequences) + 1))
            rows = []
            for index in rng.permutation(len(sequences))[:count]:
                sequence, kind = sequences[index], rng.choice(3, p=(0.05, 0.65, 0.3))
                if kind == 0:
                    rows.append(Row.prefill(sequence, block[: int(rng.integers(1, size.steady_tokens + 1))]))
                elif kind == 1:
                    rows.append(Row.decode(sequence, block[int(rng.integers(len(block)))]))
                else:
                    rows.append(Row.verify(sequence, block[: int(rng.integers(1, info.max_draft_tokens + 1))]))
            results = await client.step(rows, output=("all", "last")[int(rng.integers(2))])
            drafts = [row for row in results.rows if row.sequence.progress().pending_tokens]
            if drafts:
                accepted = [int(rng.integers(row.sequence.progress().pending_tokens + 1)) for row in drafts]
                await client.commit([row.sequence for row in drafts], accepted)
            num_rows += count
        await client.close(sequences)
    return num_rows
