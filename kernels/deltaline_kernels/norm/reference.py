"""RMS norms, as formulas: the truth that the other paths are tested against.

Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# What a gate may be of what it is given.
GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x * rsqrt(mean(x^2) + eps) * weight` of each row of x `[T, D]`, in x.dtype."""
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.to(value.dtype)).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return `residual + scale * x` in residual.dtype, and the norm of that sum, rounded to x.dtype, in x.dtype."""
    compute = torch.promote_types(residual.dtype, torch.float32)
    total = (residual.to(compute) + scale * x.to(compute)).to(residual.dtype)
    return total, rms_norm_reference(total.to(x.dtype), weight, eps)


def gated_rms_norm_reference(
    o: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, activation: str = "silu"
) -> Tensor:
    """Return `[T, HV*V]` in o.dtype: `o * rsqrt(mean(o^2) + eps) * weight * silu(z)`, or sigmoid(z).

    If `gate_first`, `x * rsqrt(mean(x^2) + eps) * weight` with x = o * silu(z).
    """
    compute = torch.promote_types(o.dtype, torch.float32)
    x, gate = o.to(compute), GATES[activation](z.to(compute))
    if gate_first:
        x = x * gate
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(compute)
    if not gate_first:
        y = y * gate
    return y.flatten(1).to(o.dtype)
