"""Tensors for calls that are made by hand, on the CPU or where a path has them."""

from __future__ import annotations

import torch
from rigs.kernels.paths import Path
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw(path: Path, *shape: int) -> Tensor:
    return normal(*shape).to(path.device, path.dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
