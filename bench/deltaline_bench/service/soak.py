"""Part `soak`: decode rows for a long time; memory of the server's process and of the device stays flat."""

from __future__ import annotations

import time

from deltaline_bench.service import memory
from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host
from deltaline_bench.service.raw import decoding
from deltaline_bench.service.size import Size
from deltaline_cli.bench.loop import closed_loop

PART = "soak"
# Of the time: what is allocated until then is the warm-up's.
WARM_UP_SHARE = 0.1
LOOKS = 100
ROWS_GOAL, ROWS_GOAL_S = 1_000_000, 600.0


async def measure(host: Host) -> list[Figure]:
    """Decode, and look at the memory a hundred times."""
    size = host.size
    rows, resident, device = 0, [], []
    async with decoding(host.address, size.decode_rows) as steps:
        begin_s = time.monotonic()
        look_s = begin_s + WARM_UP_SHARE * size.soak_s
        async for _ in closed_loop([steps.step], lambda: time.monotonic() < begin_s + size.soak_s):
            rows += size.decode_rows
            if time.monotonic() >= look_s:
                look_s += size.soak_s * (1 - WARM_UP_SHARE) / LOOKS
                resident.append(host.resident_bytes())
                device.append(memory.device_bytes(host.metrics()))
    return judge(size, rows, resident, device)


def judge(size: Size, rows: int, resident: list[int], device: list[float | None]) -> list[Figure]:
    """Make the figures of memory in bytes, as it was looked at after the warm-up."""
    flat = size.bar(0.01)
    goal = size.bar(ROWS_GOAL * size.soak_s / ROWS_GOAL_S, is_least=True)
    known = [value for value in device if value is not None]
    figures = [
        Figure(PART, "decode rows", rows, "rows", "raw", goal, f"in {size.soak_s:g} s"),
        Figure(PART, "resident memory", resident[-1] / 2**20, "MiB", "process"),
        Figure(PART, "resident memory, growth", swing(resident), "", "process", flat, f"{len(resident)} looks"),
    ]
    if len(known) < len(device):
        note = memory.missing(memory.DEVICE_BYTES)
        return [*figures, Figure(PART, "device memory, growth", None, "", "metrics", flat, note)]
    return [*figures, Figure(PART, "device memory, growth", swing(known), "", "metrics", flat)]


def swing(values: list[int] | list[float]) -> float:
    """The largest distance from the first value, in it."""
    if not values[0]:
        return float(max(values) != 0)
    return max(abs(value - values[0]) for value in values) / values[0]
