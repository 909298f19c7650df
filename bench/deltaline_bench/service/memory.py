"""What the server's metrics tell of compilation, captures and device memory, by the names that are judged."""

from __future__ import annotations

import re
from collections.abc import Mapping

COMPILATIONS = "deltaline_compilations_total"
CAPTURES = "deltaline_graph_captures_total"
ALLOCATIONS = "deltaline_device_allocations_total"
DEVICE_BYTES = "gauge deltaline_device_*bytes"
_DEVICE_BYTES = re.compile(r"deltaline_device_\w*bytes")


def growth(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    """By how much a counter has grown; None where the server does not have it."""
    return after[name] - before[name] if name in before and name in after else None


def growths(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, tuple[str, float | None]]:
    """What must stand still once a server is ready, each with the metric that tells of it and by how much it has
    grown: None where the server does not tell."""
    counted = {"compilations": COMPILATIONS, "graph captures": CAPTURES, "device allocations": ALLOCATIONS}
    held, holds = device_bytes(before), device_bytes(after)
    grown = None if held is None or holds is None else holds - held
    found = {what: (metric, growth(before, after, metric)) for what, metric in counted.items()}
    return found | {"device memory, growth": (DEVICE_BYTES, grown)}


def device_bytes(metrics: Mapping[str, float]) -> float | None:
    """The device memory that the server's process holds: its largest gauge of it, None without one."""
    return max((value for name, value in metrics.items() if _DEVICE_BYTES.fullmatch(name)), default=None)


def missing(name: str) -> str:
    """What the table says where the server does not tell."""
    return f"the server's metrics have no {name}"
