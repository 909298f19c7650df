"""Part `mixed`: decode steps while long prefills run without a pause, beside each of them alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host
from deltaline_bench.service.raw import decoding, percentile_us, window
from deltaline_bench.service.raw_link import decoding_by_link
from deltaline_bench.service.size import Size
from deltaline_cli.bench.loop import closed_loop
from deltaline_cli.bench.options import Lengths
from deltaline_cli.bench.report import Report
from deltaline_cli.bench.samples import Sample, Samples

PART = "mixed"
# So many prefills are on their way at once: when one is done the next already waits.
PREFILLS = 2
MAX_BESIDE_US = 5200.0


async def measure(host: Host) -> list[Figure]:
    """Time decode steps alone, prefills alone, and both at once."""
    begin_s = time.monotonic()
    end_s = begin_s + host.size.mixed_s
    alone = window(await _decode(host, lambda: time.monotonic() < end_s))
    prefills = await _prefill(host)
    async with asyncio.TaskGroup() as group:
        prefilling = group.create_task(_prefill(host))
        rows = await _decode(host, lambda: not prefilling.done())
    both = prefilling.result()
    beside = window(rows, both.samples.begin_s, both.samples.end_s)  # not before the prefills, nor behind them
    rates = [report.speed("prefill")["tokens_per_s"] for report in (prefills, both)]
    return judge(host.size, alone, beside, *rates)


def judge(size: Size, alone: Samples, beside: Samples, rate_alone: float, rate_beside: float) -> list[Figure]:
    """Make the figures of decode steps, and of prefills in tokens per second."""
    alone_s, beside_s = (samples.stages_s("decode")["total"] for samples in (alone, beside))
    p99 = percentile_us(beside_s, 99)
    steps, tokens = f"{size.decode_rows} rows, {len(alone_s)} steps", f"{size.mixed_tokens} tokens, last row"
    note, share = f"{len(beside_s)} steps", rate_beside / rate_alone
    return [
        Figure(PART, "decode alone, p50", percentile_us(alone_s, 50), "us", "raw", note=steps),
        Figure(PART, "decode alone, p99", percentile_us(alone_s, 99), "us", "raw"),
        Figure(PART, "decode beside prefills, p50", percentile_us(beside_s, 50), "us", "raw"),
        Figure(PART, "decode beside prefills, p99", p99, "us", "raw", size.bar(MAX_BESIDE_US), note),
        Figure(PART, "prefills alone", rate_alone, "tokens/s", "client", note=f"{tokens}; shared memory"),
        Figure(PART, "prefills beside decode", rate_beside, "tokens/s", "client"),
        Figure(PART, "prefills beside decode / alone", share, "", "client", size.bar(0.8, is_least=True)),
    ]


async def _decode(host: Host, goes_on: Callable[[], bool]) -> list[Sample]:
    """Make decode steps in a closed loop."""
    rows, link = host.size.decode_rows, host.link_address
    async with decoding(host.address, rows) if link is None else decoding_by_link(link, rows) as steps:
        return [sample async for [sample] in closed_loop([steps.step], goes_on)]


async def _prefill(host: Host) -> Report:
    """Prefill without a pause in processes of their own."""
    size = host.size
    return await host.load(
        clients=PREFILLS,
        processes=PREFILLS,
        rows=1,
        mix={"prefill": 1.0},
        prefill_tokens=Lengths(size.mixed_tokens, size.mixed_tokens),
        prefill_output="last",
        duration_s=size.mixed_s,
        ramp_up_s=0.0,
        shared_memory_bytes=size.shared_bytes(size.mixed_tokens),
    )
