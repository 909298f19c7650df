"""The weights of experts, in the dtype of the tokens or in FP8."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltaline_kernels.cpu.scaled import dequantised


class ExpertWeights(NamedTuple):
    """Weights `[E, N, K]`. scales: of those in e4m3, `[E, halves * ceil(N / halves / 128), ceil(K / 128)]` fp32: each
    block of 128 rows of a half and of 128 columns has one; None of weights in the dtype of the tokens."""

    values: Tensor
    scales: Tensor | None = None
    halves: int = 1

    def of(self, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the weights of an expert stand for: `[N, K]`."""
        if self.scales is None:
            return self.values[expert].to(dtype)
        halves = zip(self.values[expert].chunk(self.halves), self.scales[expert].chunk(self.halves), strict=True)
        return torch.cat([dequantised(values, scales, dtype) for values, scales in halves])
