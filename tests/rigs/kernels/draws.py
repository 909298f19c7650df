"""Tensors on the CPU for calls that are made by hand."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
