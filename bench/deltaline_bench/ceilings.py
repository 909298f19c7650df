"""The three limits of a device, measured in the same run: launch floor, copy and read-only bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltaline_bench.kernel import copy_all, do_nothing, read_all
from deltaline_bench.timer import Timer, time_in_turns

# Several times the L2, and what a large batch moves: a copy of more than this is slower.
STREAM_BYTES = 256 << 20


@dataclass(frozen=True)
class Ceilings:
    """Times in microseconds, bandwidths in bytes per second (a copy counts what it reads and what it writes)."""

    floor_us: float
    copy_bytes_per_s: float
    read_bytes_per_s: float


def measure_ceilings(timer: Timer, device: torch.device, rounds: int) -> Ceilings:
    """Time an empty kernel, a copy and a read of 256 MiB; needs twice that of the device.

    The copy is the faster of a kernel's and torch's own, which a graph holds as a memory copy.
    """
    source = torch.randn(STREAM_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    launches = {
        "floor": timer.prepare(lambda: do_nothing(source)),
        "copy": timer.prepare(lambda: copy_all(source, target)),
        "torch copy": timer.prepare(lambda: target.copy_(source)),
        "read": timer.prepare(lambda: read_all(source)),
    }
    times = time_in_turns(timer, {name: launch.run for name, launch in launches.items()}, rounds)
    return Ceilings(
        floor_us=times["floor"].median_us,
        copy_bytes_per_s=2 * STREAM_BYTES / (min(times["copy"].median_us, times["torch copy"].median_us) * 1e-6),
        read_bytes_per_s=STREAM_BYTES / (times["read"].median_us * 1e-6),
    )
