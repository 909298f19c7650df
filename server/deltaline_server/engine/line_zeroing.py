"""Zeroing lines on a GPU: one launch for all layers, a graph."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_server.layers.state_pool import StatePool
from deltaline_server.tables.lines import NULL_LINE

# Lines that one replay zeroes.
LINES = 64


class LineZeroing:
    """A graph that zeroes the lines that a tensor on the device names."""

    def __init__(self, pool: StatePool) -> None:
        """Capture it on the current stream, which is also to replay it."""
        self._pool = pool
        with torch.inference_mode(False):  # threads write to it that are not in that mode
            self._lines = torch.full((LINES,), NULL_LINE, dtype=torch.int64, device=pool.device)
        pool.zero_at(self._lines)  # the null line is zero anyway
        stream = torch.cuda.current_stream()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            pool.zero_at(self._lines)

    def zero(self, lines: NDArray[np.int64]) -> None:
        """Begin to zero lines on the current stream; `lines` may change once this returns.

        Raises IndexError if one is not a line, before any is zeroed.
        """
        self._pool.check_lines(lines)
        for begin in range(0, len(lines), LINES):
            part = lines[begin : begin + LINES]
            named = np.full(LINES, NULL_LINE, dtype=np.int64)
            named[: len(part)] = part
            # From memory that is not pinned: it is read before this returns, and nothing is waited for.
            self._lines.copy_(torch.from_numpy(named), non_blocking=True)
            self._graph.replay()
