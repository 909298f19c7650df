"""Pinned memory on a GPU: what is copied are the pages that are mapped now."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltaline_server.pinning import CudaPinning

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
