"""Where the time of one batch goes on a GPU: its kernels by name, and how long the device waited before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deltaline_cli.text import table

# The profiler's first replays wait for its own work.
REPLAYS = 3
MAX_NAME = 76


class Launch(NamedTuple):
    """One kernel or copy, microseconds."""

    name: str
    begin: float
    end: float


@dataclass
class Total:
    """All launches of a name: how many, how long they ran, and how long the device had nothing to do before them."""

    count: int = 0
    busy_us: float = 0.0
    idle_us: float = 0.0


def trace(replay: Callable[[], object]) -> list[Launch]:
    """What a replay has the device do, in the order of its beginning."""
    for _ in range(REPLAYS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            replay()
            torch.cuda.synchronize()
        found = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    launches = [Launch(event.name, event.time_range.start, event.time_range.end) for event in found]
    return sorted(launches, key=lambda launch: launch.begin)


def totals(launches: Sequence[Launch]) -> dict[str, Total]:
    """Launches by name. What ran beside others counts for itself; nothing waits before the first one."""
    by_name: dict[str, Total] = {}
    end = launches[0].begin if launches else 0.0
    for launch in launches:
        total = by_name.setdefault(launch.name, Total())
        total.count += 1
        total.busy_us += launch.end - launch.begin
        total.idle_us += max(0.0, launch.begin - end)
        end = max(end, launch.end)
    return by_name


def write_profile(launches: Sequence[Launch], most: int = 25) -> str:
    """The names that take most, as a table, and what all of them take."""
    if not launches:
        return "profile: the profiler saw no kernel"
    by_name = totals(launches)
    span = max(launch.end for launch in launches) - launches[0].begin
    ordered = sorted(by_name.items(), key=lambda item: -(item[1].busy_us + item[1].idle_us))
    rows = [("launches", "us", "us each", "idle before", "of all", "kernel")]
    for name, total in ordered[:most]:
        rows.append((str(total.count), *_times(total, span), " ".join(name.split())[:MAX_NAME]))
    rest = [total for _, total in ordered[most:]]
    if rest:
        beside = Total(*(sum(values) for values in zip(*(vars(total).values() for total in rest), strict=True)))
        rows.append((str(beside.count), *_times(beside, span), f"{len(rest)} others"))
    busy, idle = (sum(getattr(total, name) for total in by_name.values()) for name in ("busy_us", "idle_us"))
    head = f"{len(launches)} launches in {span:.0f} us: busy for {busy:.0f} us, and the device waited {idle:.0f} us"
    return f"{head}\n{table(rows, align='>>>>><')}"


def _times(total: Total, span_us: float) -> tuple[str, str, str, str]:
    share = (total.busy_us + total.idle_us) / span_us
    return f"{total.busy_us:.0f}", f"{total.busy_us / total.count:.2f}", f"{total.idle_us:.0f}", f"{share:.1%}"
