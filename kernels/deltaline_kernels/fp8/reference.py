"""Products with FP8 weights as a formula: the truth that the other paths are tested against.

Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
from torch import Tensor

from deltaline_kernels.checks import FP8_BLOCK


def multiply_fp8_reference(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return `[T, N]` in x.dtype of x `[T, K]`, values `[N, K]` and the scales of their blocks."""
    compute = torch.promote_types(x.dtype, torch.float32)
    rows, columns = (torch.arange(size, device=x.device) // FP8_BLOCK for size in weight.shape)
    meant = weight.to(compute) * scales.to(compute)[rows[:, None], columns]
    return (x.to(compute) @ meant.T).to(x.dtype)
