"""Tells whether the host waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


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
