"""Products of tokens with a weight, as a formula: the truth that the other paths are tested against.

Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Return `[T, N]` in x.dtype: `x @ weight.T`."""
    compute = torch.promote_types(x.dtype, torch.float32)
    return (x.to(compute) @ weight.to(compute).t()).to(x.dtype)
