"""Graphs of what all ranks call together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Made = TypeVar("Made")

WARM_UP_CALLS = 3


def captured(call: Callable[[], Made], calls: int = 1) -> tuple[torch.cuda.CUDAGraph, Made]:
    """Capture so many calls in a graph, behind some that warm up, and replay it once; the graph, and what its last call
    makes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls - 1):
            call()
        made = call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, made
