"""The activation of a gated MLP: silu(gate) * up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.activation.reference import silu_and_mul_reference
from deltaline_kernels.checks import ACTIVATIONS, check_tensor, parse_eps
from deltaline_kernels.operators import operator

__all__ = ["silu_and_mul", "silu_and_mul_reference"]


def _fake(gate_up: Tensor, **_: Any) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@operator(_fake)
def silu_and_mul(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """Return silu(gate) * up, silu(gate) rounded before it is multiplied, as models do.

    Args:
        gate_up: `[T, 2 N]` fp32, bf16 or fp16, gate | up; a row stride is fine. T may be 0.
        limit: above 0, the gate is at most that, and up within it.

    Returns:
        `[T, N]` in gate_up.dtype, silu and product computed in fp32.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_tensor("gate_up", gate_up, (None, None), ACTIVATIONS, None, row_stride=True)
    num_tokens, width = gate_up.shape
    if limit != 0.0:
        limit = parse_eps("limit", limit)
    if width % 2:
        raise ValueError(f"gate_up: expected an even number of channels, got {width}")
    if gate_up.device.type == "cpu":
        gate, up = gate_up.chunk(2, dim=-1)
        if limit:
            # In fp32, which has the limit.
            gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
        return (F.silu(gate).to(gate_up.dtype) * up).to(gate_up.dtype)
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.activation.kernel import silu_and_mul_triton

    y = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    silu_and_mul_triton(gate_up, y, limit)
    return y
