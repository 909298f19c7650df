"""Part `prefill`: a long prefill, inline and through shared memory, beside an echo of its bytes and a copy of them."""

from __future__ import annotations

import asyncio
import statistics
import time

import torch

from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host
from deltaline_bench.service.raw import RawCalls, measured
from deltaline_bench.service.size import Size
from deltaline_cli.bench.options import Lengths
from deltaline_cli.bench.samples import Sample, sample

PART = "prefill"
MESSAGE_BYTES = 1 << 20


async def measure(host: Host) -> list[Figure]:
    """Time prefills both ways, echoes and copies; medians."""
    size = host.size
    inline, shared = [await _prefill_s(host, num_bytes) for num_bytes in (0, size.shared_bytes(size.prefill_tokens))]
    num_bytes = size.prefill_tokens * size.token_bytes
    echo_s = await echo_s_of(host.echo_address, num_bytes, size.prefill_rounds)
    return judge(size, inline, shared, echo_s, copies_s(num_bytes), by_link=host.link_address is not None)


def judge(
    size: Size,
    inline: tuple[float, float],
    shared: tuple[float, float],
    echo_s: float,
    copy_s: float | None,
    *,
    by_link: bool,
) -> list[Figure]:
    """Make the figures. inline, shared: seconds end to end and computed; copy_s: both ways, None without a device."""
    total_s, compute_s = inline
    megabytes = size.prefill_tokens * size.token_bytes / 2**20
    figures = [
        Figure(PART, "inline", total_s * 1e3, "ms", "client", note=f"{size.prefill_tokens} tokens, {megabytes:g} MiB"),
        Figure(PART, "inline, compute", compute_s * 1e3, "ms", "client", note="sum of its chunks"),
        Figure(PART, "echo of the same bytes", echo_s * 1e3, "ms", "raw", note="messages of 1 MiB"),
        Figure(PART, "inline / (echo + compute)", total_s / (echo_s + compute_s), "", "client", size.bar(1.25)),
    ]
    bar, name = size.bar(1.1 if by_link else 1.25), "shared memory / (compute + copies)"
    total_s, compute_s = shared
    figures += [
        Figure(PART, "shared memory", total_s * 1e3, "ms", "client"),
        Figure(PART, "shared memory, compute", compute_s * 1e3, "ms", "client"),
    ]
    if copy_s is None:
        note = "no device to copy to: beside compute alone"
        return [*figures, Figure(PART, name, total_s / compute_s, "", "client", bar, note)]
    return [
        *figures,
        Figure(PART, "copies, pinned, both ways", copy_s * 1e3, "ms", "engine"),
        Figure(PART, name, total_s / (compute_s + copy_s), "", "client", bar),
    ]


async def _prefill_s(host: Host, shared_memory_bytes: int) -> tuple[float, float]:
    """Median seconds of a prefill end to end, and of its computation."""
    report = await host.load(
        clients=1,
        rows=1,
        mix={"prefill": 1.0},
        prefill_tokens=Lengths(host.size.prefill_tokens, host.size.prefill_tokens),
        steps=host.size.prefill_rounds,
        ramp_up_s=0.0,
        shared_memory_bytes=shared_memory_bytes,
    )
    stages = report.samples.stages_s("prefill")
    return statistics.median(stages["total"]), statistics.median(stages["compute"])


async def echo_s_of(address: str, num_bytes: int, rounds: int) -> float:
    """Median seconds in which bytes in messages of 1 MiB go to the echo and come back, sent while others are read."""
    messages = -(-num_bytes // MESSAGE_BYTES)
    payload = bytes(min(MESSAGE_BYTES, num_bytes))
    async with RawCalls(address, "stream", "/bare.Echo/stream") as echo:

        async def send() -> None:
            for _ in range(messages):
                await echo.stream.write(payload)

        async def exchange() -> Sample:
            sent_s = time.monotonic()
            sending = asyncio.create_task(send())
            for _ in range(messages):
                await echo.stream.read()
            await sending
            return sample("prefill", 0, sent_s, time.monotonic())

        [echoes] = await measured(exchange, rounds=rounds, warm_up=1)
    return float(statistics.median(echoes.stages_s("prefill")["total"]))


def copies_s(num_bytes: int, rounds: int = 10) -> float | None:
    """Median seconds of a copy of pinned bytes to the device and of one back; None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device="cuda")
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin_s)
    return statistics.median(taken)
