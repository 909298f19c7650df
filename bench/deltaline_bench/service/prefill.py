"""Part `prefill`: a long prefill, inline and through shared memory, beside an echo of its bytes and a copy of them."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import torch

from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host, connect, connect_shared, hidden_states, place
from deltaline_bench.service.raw import echoes
from deltaline_bench.service.size import Size
from deltaline_client import AsyncClient, Row

PART = "prefill"
MESSAGE_BYTES = 1 << 20
WARM_UP = 1


async def measure(host: Host) -> list[Figure]:
    """Time prefills both ways, echoes and copies; medians."""
    size = host.size
    num_bytes = size.prefill_tokens * size.token_bytes
    async with connect(host.address) as client:
        inline = await _prefills(client, size, is_shared=False)
    async with connect_shared(host.address, 4 * num_bytes) as client:
        shared = await _prefills(client, size, is_shared=True)
    echo_s = [await _echo(host.echo_address, num_bytes) for _ in range(WARM_UP + size.prefill_rounds)]
    return judge(size, inline, shared, statistics.median(echo_s[WARM_UP:]), copies_s(num_bytes))


def judge(
    size: Size, inline: tuple[float, float], shared: tuple[float, float], echo_s: float, copy_s: float | None
) -> list[Figure]:
    """Make the figures. inline, shared: seconds end to end and computed; copy_s: both ways, None without a device."""
    total_s, compute_s = inline
    megabytes = size.prefill_tokens * size.token_bytes / 2**20
    figures = [
        Figure(PART, "inline", total_s * 1e3, "ms", "client", note=f"{size.prefill_tokens} tokens, {megabytes:g} MiB"),
        Figure(PART, "inline, compute", compute_s * 1e3, "ms", "client", note="sum of its chunks"),
        Figure(PART, "echo of the same bytes", echo_s * 1e3, "ms", "raw", note="messages of 1 MiB"),
        Figure(PART, "inline / (echo + compute)", total_s / (echo_s + compute_s), "", "client", size.bar(1.3)),
    ]
    bar, name = size.bar(1.25), "shared memory / (compute + copies)"
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


async def _prefills(client: AsyncClient, size: Size, *, is_shared: bool) -> tuple[float, float]:
    """Median seconds of a prefill end to end, and of its computation; each on a fresh sequence."""
    hidden = await hidden_states(client, size.prefill_tokens)
    options: Any = {}
    if is_shared:  # as a user would who cares: no copies in and out of it
        hidden, options = await place(client, hidden), {"copy": False}
    total_s, compute_s = [], []
    for _ in range(WARM_UP + size.prefill_rounds):
        async with await client.open() as sequence:
            begin_s = time.perf_counter()
            result = await client.step([Row.prefill(sequence, hidden)], **options)
            total_s.append(time.perf_counter() - begin_s)
            compute_s.append(result.timing.compute_s)
            del result  # its outputs are shared memory
    return statistics.median(total_s[WARM_UP:]), statistics.median(compute_s[WARM_UP:])


async def _echo(address: str, num_bytes: int) -> float:
    """Seconds in which bytes in messages of 1 MiB go to the echo and come back, sent while others are read."""
    messages = -(-num_bytes // MESSAGE_BYTES)
    payload = bytes(min(MESSAGE_BYTES, num_bytes))
    async with echoes(address) as stream:
        await stream.exchange(b"first")

        async def send() -> None:
            for _ in range(messages):
                await stream.call.write(payload)

        begin_s = time.perf_counter()
        sending = asyncio.create_task(send())
        for _ in range(messages):
            await stream.call.read()
        await sending
        return time.perf_counter() - begin_s


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
