"""What must hold of launches on a GPU: the host waits for nothing, and a CUDA graph follows what its tensors hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from rigs.kernels.recurrence_checks import same_bits
from torch import Tensor


@contextmanager
def no_waits() -> Iterator[None]:
    """Fail where something waits; what does is seen to fail. Needs a filter for the warning that the mode is new."""
    held = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
        with pytest.raises(RuntimeError, match="synchroniz"):
            held.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_replay(run: Callable[[], Sequence[Tensor]], mutated: Sequence[Tensor], change: Callable[[], None]) -> None:
    """Capture `run`, `change` what its tensors hold, and compare a replay with another run: what both return and leave.

    mutated: what `run` reads and writes.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    change()
    before = [x.clone() for x in mutated]
    graph.replay()
    got = [x.clone() for x in (*captured, *mutated)]
    for x, old in zip(mutated, before, strict=True):
        x.copy_(old)
    for x, want in zip(got, (*run(), *mutated), strict=True):
        assert same_bits(x, want)
