"""Pinned memory on a GPU: what is copied are the pages that are mapped now."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltaline_server.memory.pinning import CudaPinning

pytestmark = pytest.mark.gpu


def test_pages_that_are_pinned_already_are_pinned_anew() -> None:
    pinning, memory = CudaPinning(torch.device("cuda")), np.zeros(1 << 20, dtype=np.uint8)
    tensor = torch.from_numpy(memory)
    assert not tensor.is_pinned()
    pinning.pin(memory)
    assert tensor.is_pinned()
    pinning.pin(memory)
    memory[:] = 7
    assert tensor.to("cuda", non_blocking=True).eq(7).all()
    pinning.unpin(memory)
    assert not tensor.is_pinned()
    with pytest.raises(RuntimeError, match="CUDA error"):
        pinning.unpin(memory)


def test_what_cannot_be_pinned_spoils_no_later_launch() -> None:
    pinning, memory = CudaPinning(torch.device("cuda")), np.zeros(1 << 20, dtype=np.uint8)
    first = -memory.ctypes.data % 4096
    page = memory[first + 4096 : first + 8192]
    pinning.pin(page)
    with pytest.raises(RuntimeError, match="CUDA error 712"):
        pinning.pin(memory)
    assert torch.ones(3, device="cuda").sum() == 3
    pinning.unpin(page)
    with pytest.raises(RuntimeError, match="CUDA error 713"):
        pinning.unpin(page)
    assert torch.ones(3, device="cuda").sum() == 3
