"""silu(gate) * up, as a formula: the truth that the other paths are tested against.

Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul_reference(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """Return `[T, N]` in gate_up.dtype of gate | up `[T, 2 N]`: `silu(gate)`, rounded, times `up`, limited before."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate).to(gate_up.dtype) * up).to(gate_up.dtype)
