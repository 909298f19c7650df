"""Gated RMS norm on the CPU: vectorised PyTorch over blocks of tokens that fit in cache."""

import torch.nn.functional as F
from torch import Tensor

# Values per block: 256 tokens x 1024 values (1 MiB of fp32).
BLOCK_VALUES = 256 * 1024


def gated_rms_norm_cpu(o: Tensor, z: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    """Write `o * rsqrt(mean(o^2) + eps) * weight * silu(z)` to y `[T, HV*V]`."""
    num_tokens, num_heads, value_dim = o.shape
    w = weight.float()
    block = max(1, BLOCK_VALUES // max(1, num_heads * value_dim))
    for begin in range(0, num_tokens, block):
        part = o[begin : begin + block].float()
        inverse = part.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        gate = F.silu(z[begin : begin + block].float()).mul_(w)
        y[begin : begin + block] = gate.mul_(part).mul_(inverse).flatten(1)
