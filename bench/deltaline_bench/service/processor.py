"""Time of processors that calls take, at both ends: waits, and what else a host does, don't count to it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path


def cpu_ns(pid: int) -> int:
    """Time that all threads of a process have had on processors."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread is gone
            total += int((task / "schedstat").read_text().split()[0])
    return total


async def cost_ns(pid: int, call: Callable[[], Awaitable[object]], count: int) -> float:
    """Processor time of a call, of this process and the other one together, of so many one after the other."""
    before = cpu_ns(pid) + time.process_time_ns()
    for _ in range(count):
        await call()
    return (cpu_ns(pid) + time.process_time_ns() - before) / count
