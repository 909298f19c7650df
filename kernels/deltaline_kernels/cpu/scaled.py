"""Weights in FP8 whose blocks have scales, as what they stand for."""

import torch
from torch import Tensor

from deltaline_kernels.checks import FP8_BLOCK


def dequantised(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values `[N, K]` e4m3 times the scales `[ceil(N / 128), ceil(K / 128)]` of their blocks."""
    rows, columns = values.shape
    of_rows = scales.to(dtype).repeat_interleave(FP8_BLOCK, 0)[:rows]
    return values.to(dtype).mul_(of_rows.repeat_interleave(FP8_BLOCK, 1)[:, :columns])
