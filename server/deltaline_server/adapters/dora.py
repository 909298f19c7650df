"""DoRA's norm: how far each row of a weight is stretched once its direction was changed.

The magnitude m and the direction are learnt apart: W' = m * V / ||V|| row by row, V = W + s B A (arXiv 2402.09353,
section 4). At inference ||V|| is constant, so that m / ||V|| is one factor per row of the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows whose V is held at a time.
ROWS = 1024


def row_factors(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """Return m / ||W + s B A|| of each row, `[out]` fp32; not finite where the norm is zero.

    weight `[out, in]`, a `[R, in]`, b `[out, R]`, magnitude `[out]`, of any floating dtype; computed in fp32.
    """
    factors = torch.empty(weight.shape[0], dtype=torch.float32)
    a = a.float()
    for begin in range(0, weight.shape[0], ROWS):
        rows = slice(begin, begin + ROWS)
        direction = torch.addmm(weight[rows].float(), b[rows].float(), a, alpha=scale)
        torch.div(magnitude[rows].float(), direction.norm(dim=1), out=factors[rows])
    return factors
