"""The Timer of a CUDA device: calls captured in graphs, events around the replay, L2 flushed by reading.

Does not know what a call computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deltaline_bench.kernel import read_all
from deltaline_bench.timer import Launch

WARMUP_CALLS = 3
# Several times the L2. Read, not written: dirty lines would be written back at the expense of the next kernel.
FLUSH_BYTES = 256 << 20


class _Replay:
    """Replays a graph. Holds `call` as well: the graph works on the tensors that `call` owns."""

    def __init__(self, graph: torch.cuda.CUDAGraph, captured: Any, call: Callable[[], Any]) -> None:
        self._graph, self._captured, self._call = graph, captured, call

    def __call__(self) -> Any:
        self._graph.replay()
        return self._captured


class CudaTimer:
    """Times runs on the current CUDA device; holds 256 MiB of it."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        flushed = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._flush = self.prepare(lambda: read_all(flushed)).run

    def prepare(self, call: Callable[[], Any]) -> Launch:
        """Call three times on a side stream (compiling, tuning), then capture one call in a graph.

        A call that cannot be captured is launched as it is. What the call itself raises while it warms up is raised.
        """
        home = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(home)
        result = None
        with torch.cuda.stream(side):
            for _ in range(WARMUP_CALLS):
                result = call()
        home.wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                captured = call()
        except Exception as error:  # whatever a peer does that a capture forbids; the report says what
            # A capture that failed leaves its own stream as the current one.
            torch.cuda.set_stream(home)
            torch.cuda.synchronize()
            return Launch(call, result, is_captured=False, reason=f"{type(error).__name__}: {error}")
        return Launch(_Replay(graph, captured, call), captured, is_captured=True)

    def time(self, run: Callable[[], Any]) -> None:
        """Enqueue a flush of the L2, then `run` between two events."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush()
        begin.record()
        run()
        end.record()
        self._events.append((begin, end))

    def read(self) -> list[float]:
        """Wait for the device; return microseconds."""
        torch.cuda.synchronize()
        values = [begin.elapsed_time(end) * 1e3 for begin, end in self._events]
        self._events.clear()
        return values
