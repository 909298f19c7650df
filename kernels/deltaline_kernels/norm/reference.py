"""Gated RMS norm, as a formula: the truth that the other paths are tested against.

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
