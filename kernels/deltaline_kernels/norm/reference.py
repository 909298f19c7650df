"""RMS norms, as formulas: the truth that the other paths are tested against.

Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm_reference(o: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False) -> Tensor:
    """Return `[T, HV*V]` in o.dtype: `o * rsqrt(mean(o^2) + eps) * weight * silu(z)`.

    If `gate_first`, `x * rsqrt(mean(x^2) + eps) * weight` with x = o * silu(z).
    """
    compute = torch.promote_types(o.dtype, torch.float32)
    x, gate = o.to(compute), F.silu(z.to(compute))
    if gate_first:
        x = x * gate
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(compute)
    if not gate_first:
        y = y * gate
    return y.flatten(1).to(o.dtype)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `[T, D]` in x.dtype: `x * rsqrt(mean(x^2) + eps) * weight`."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(compute)).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the sum residual + scale * x in residual.dtype, and its norm in x.dtype."""
    compute = torch.promote_types(residual.dtype, torch.float32)
    added = (residual.to(compute) + scale * x.to(compute)).to(residual.dtype)
    return added, rms_norm_reference(added.to(x.dtype), weight, eps)
