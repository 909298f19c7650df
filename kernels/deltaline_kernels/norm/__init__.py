"""Gated RMS norm of a layer's heads or groups of channels."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, check_tensor, parse_eps
from deltaline_kernels.norm.cpu import gated_rms_norm_cpu
from deltaline_kernels.norm.reference import gated_rms_norm_reference
from deltaline_kernels.operators import operator

__all__ = ["gated_rms_norm", "gated_rms_norm_reference"]


def _fake(o: Tensor, **_: Any) -> Tensor:
    return o.new_empty(o.shape[0], o.shape[1] * o.shape[2])


@operator(_fake)
def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False) -> Tensor:
    """Normalise each head of o, scale it by `weight` and gate it by silu(z).

    Args:
        o: `[T, HV, V]` fp32, bf16 or fp16; z: the same shape and dtype; a row stride is fine for both. A Mamba2 layer
            has the groups of its norm for heads, one of all channels where it has none.
        weight: `[V]`, the same for all heads, or `[HV, V]` (plain, not 1 + w), fp32 or o.dtype.
        eps: added to the mean square; at least 0.
        gate_first: gate o, then normalise what comes of it, as Mamba2 does; else normalise, then gate.

    Returns:
        `[T, HV*V]` in o.dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_tensor("o", o, (None, None, None), ACTIVATIONS, o.device, row_stride=True)
    check_tensor("z", z, o.shape, (o.dtype,), o.device, row_stride=True)
    is_shared = not isinstance(weight, Tensor) or weight.ndim == 1
    check_tensor("weight", weight, o.shape[2:] if is_shared else o.shape[1:], (torch.float32, o.dtype), o.device)
    eps = parse_eps("eps", eps)
    y = torch.empty(o.shape[0], o.shape[1] * o.shape[2], dtype=o.dtype, device=o.device)
    if o.device.type == "cpu":
        gated_rms_norm_cpu(o, z, weight, eps, y, gate_first=gate_first)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.norm.kernel import gated_rms_norm_triton

        gated_rms_norm_triton(o, z, weight, eps, y, gate_first=gate_first)
    return y
