"""RMS norms on the CPU: vectorised PyTorch, the gated one over blocks of tokens that fit in cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.cpu.elementwise import evenly_
from deltaline_kernels.norm.reference import GATES

# Values per block: 256 tokens x 1024 values (1 MiB of fp32).
BLOCK_VALUES = 256 * 1024


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x `[T, D]`. Arguments are validated by `rms_norm`."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def gated_rms_norm_cpu(
    o: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    y: Tensor,
    *,
    gate_first: bool = False,
    activation: str = "silu",
) -> None:
    """Write `o * rsqrt(mean(o^2) + eps) * weight * gate` to y `[T, HV*V]`, the norm that of o * gate or of o."""
    num_tokens, num_heads, value_dim = o.shape
    w = weight.float()
    block = max(1, BLOCK_VALUES // max(1, num_heads * value_dim))
    for begin in range(0, num_tokens, block):
        part = o[begin : begin + block].float()
        gate = z[begin : begin + block].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        evenly_(GATES[activation], gate)
        if gate_first:
            part = gate.mul_(part)
        inverse = part.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        result = part if gate_first else gate.mul_(part)
        y[begin : begin + block] = result.mul_(w).mul_(inverse).flatten(1)
