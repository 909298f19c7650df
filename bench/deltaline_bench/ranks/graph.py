"""Graphs of what all ranks call together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Made = TypeVar("Made")

WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Captured(Generic[Made]):
    """Calls in a graph.

    Attributes:
        graph: of the calls. made: what the last one makes, again in every replay.
        call: held, as every replay reads the tensors that it has.
    """

    graph: torch.cuda.CUDAGraph
    made: Made
    call: Callable[[], Made]

    def replay(self) -> None:
        self.graph.replay()


def captured(call: Callable[[], Made], calls: int = 1) -> Captured[Made]:
    """Capture so many calls in a graph, behind some that warm up, and replay it once."""
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
    return Captured(graph, made, call)
