"""RMS norms: of hidden states, with the residual that a branch is added to; gated, of a layer's heads or groups."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, check_tensor, parse_eps, parse_number
from deltaline_kernels.norm.cpu import add_rms_norm_cpu, gated_rms_norm_cpu, rms_norm_cpu
from deltaline_kernels.norm.reference import (
    add_rms_norm_reference,
    gated_rms_norm_reference,
    rms_norm_reference,
)
from deltaline_kernels.operators import operator

__all__ = [
    "add_rms_norm",
    "add_rms_norm_reference",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "rms_norm",
    "rms_norm_reference",
]


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


def _fake_norm(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator(_fake_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x * rsqrt(mean(x^2) + eps) * weight`, `[T, D]` in x.dtype, computed in fp32 and rounded once.

    Args:
        x: `[T, D]` fp32, bf16 or fp16, a row stride is fine; D at least 1.
        weight: `[D]` fp32 (plain, not 1 + w).
        eps: added to the mean square; at least 0.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_tensor("x", x, (None, None), ACTIVATIONS, None, row_stride=True)
    eps = _check_norm(x, weight, eps)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.device.type == "cpu":
        rms_norm_cpu(x, weight, eps, y)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.norm.residual import rms_norm_triton

        rms_norm_triton(x, weight, eps, y)
    return y


def _fake_both(x: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), x.new_empty(x.shape)


@operator(_fake_both, results=2)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return residual + scale * x, rounded to residual.dtype, and the norm of that, rounded to x.dtype, as `rms_norm`.

    Args:
        x: `[T, D]` fp32, bf16 or fp16: what a branch adds; a row stride is fine; D at least 1.
        residual: `[T, D]` fp32 or x.dtype; a row stride is fine. What is normed is the sum, rounded to x.dtype first.
        weight, eps: as `rms_norm` has them.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_tensor("x", x, (None, None), ACTIVATIONS, None, row_stride=True)
    check_tensor("residual", residual, x.shape, (torch.float32, x.dtype), x.device, row_stride=True)
    eps, scale = _check_norm(x, weight, eps), parse_number("scale", scale)
    added = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.device.type == "cpu":
        add_rms_norm_cpu(x, residual, weight, eps, scale, added, y)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.norm.residual import add_rms_norm_triton

        add_rms_norm_triton(x, residual, weight, eps, scale, added, y)
    return added, y


def _check_norm(x: Tensor, weight: Tensor, eps: float) -> float:
    """Check what norms the rows of x; return eps."""
    if x.shape[1] < 1:
        raise ValueError(f"x: expected at least 1 channel, got shape {list(x.shape)}")
    check_tensor("weight", weight, x.shape[1:], (torch.float32,), x.device)
    return parse_eps("eps", eps)
