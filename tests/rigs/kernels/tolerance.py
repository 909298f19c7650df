"""How far a kernel may be from its reference, per dtype of its inputs. Never loosened by the environment."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest difference, relative to the largest value of the reference (at least 1).
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 4e-3}


def assert_close(name: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Fail unless NaNs are at the same places and the rest agrees within the limit of `dtype`."""
    assert got.shape == want.shape, f"{name}: {got.shape} is not {want.shape}"
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert torch.equal(got.isnan(), want.isnan()), f"{name}: NaNs at other places"
    got, want = got.nan_to_num(), want.nan_to_num()
    scale = max(1.0, float(want.abs().amax())) if want.numel() else 1.0
    error = float((got - want).abs().amax()) / scale if want.numel() else 0.0
    assert error <= LIMITS[dtype], f"{name}: error {error:.2e} above {LIMITS[dtype]:.0e}"
