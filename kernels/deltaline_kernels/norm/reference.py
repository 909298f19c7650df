"""Gated RMS norm, as a formula: the truth that the other paths are tested against.

Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm_reference(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `o * rsqrt(mean(o^2) + eps) * weight * silu(z)` as `[T, HV*V]` in o.dtype."""
    compute = torch.promote_types(o.dtype, torch.float32)
    wide = o.to(compute)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(compute) * F.silu(z.to(compute))
    return y.flatten(1).to(o.dtype)
