"""RMS norms: of hidden states, alone or behind a residual's sum, and gated ones of heads or groups of channels."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, check_tensor, parse_eps, parse_number
from deltaline_kernels.norm.cpu import gated_rms_norm_cpu, rms_norm_cpu
from deltaline_kernels.norm.reference import (
    GATES,
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


def _fake_hidden(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_add(x: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), x.new_empty(x.shape)


@operator(_fake_hidden)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` of each token.

    Args:
        x: `[T, D]` fp32, bf16 or fp16; a row stride is fine. T may be 0.
        weight: `[D]` fp32 (1 + w where a checkpoint's norm says so).
        eps: added to the mean square; at least 0.

    Returns:
        `[T, D]` in x.dtype, computed in fp32 and rounded once. A token's bits depend on no other.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    eps = _check_hidden(x, weight, eps)
    if x.device.type == "cpu":
        return rms_norm_cpu(x, weight, eps)
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.norm.hidden import rms_norm_triton

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm_triton(x, weight, eps, y)
    return y


@operator(_fake_add, results=2)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the residual behind a sublayer that made x, and its norm, which the next sublayer is given.

        total = residual + scale x
        y     = total / sqrt(mean(total^2) + eps) * weight        total rounded to x.dtype

    Args:
        x: `[T, D]` fp32, bf16 or fp16; residual: the same shape in x.dtype or fp32; a row stride is fine for both. T
            may be 0.
        weight: `[D]` fp32 (1 + w where a checkpoint's norm says so).
        eps: added to the mean square; at least 0.
        scale: what x is multiplied by before it is added.

    Returns:
        total `[T, D]` in residual.dtype and y `[T, D]` in x.dtype, each computed in fp32 and rounded once. A token's
        bits depend on no other.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    eps, scale = _check_hidden(x, weight, eps), parse_number("scale", scale)
    check_tensor("residual", residual, x.shape, (x.dtype, torch.float32), x.device, row_stride=True)
    if x.device.type == "cpu":
        # In 16 bits the CPU's sum rounds scale x before it adds it.
        total = residual.float().add(x, alpha=scale).to(residual.dtype)
        return total, rms_norm_cpu(total.to(x.dtype), weight, eps)
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.norm.hidden import add_rms_norm_triton

    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_rms_norm_triton(x, residual, weight, eps, scale, total, y)
    return total, y


def _check_hidden(x: Tensor, weight: Tensor, eps: float) -> float:
    """Return eps as a float; raise TypeError or ValueError unless it is what is added for a norm of x by `weight`."""
    check_tensor("x", x, (None, None), ACTIVATIONS, None, row_stride=True)
    check_tensor("weight", weight, x.shape[1:], (torch.float32,), x.device)
    return parse_eps("eps", eps)


@operator(_fake)
def gated_rms_norm(
    o: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, activation: str = "silu"
) -> Tensor:
    """Normalise each head of o, scale it by `weight` and gate it by silu(z) or sigmoid(z).

    Args:
        o: `[T, HV, V]` fp32, bf16 or fp16; z: the same shape and dtype; a row stride is fine for both. A Mamba2 layer
            has the groups of its norm for heads, one of all channels where it has none.
        weight: `[V]`, the same for all heads, or `[HV, V]` (plain, not 1 + w), fp32 or o.dtype.
        eps: added to the mean square; at least 0.
        gate_first: gate o, then normalise what comes of it, as Mamba2 does; else normalise, then gate.
        activation: of z, "silu" or "sigmoid".

    Returns:
        `[T, HV*V]` in o.dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_tensor("o", o, (None, None, None), ACTIVATIONS, None, row_stride=True)
    check_tensor("z", z, o.shape, (o.dtype,), o.device, row_stride=True)
    is_shared = not isinstance(weight, Tensor) or weight.ndim == 1
    check_tensor("weight", weight, o.shape[2:] if is_shared else o.shape[1:], (torch.float32, o.dtype), o.device)
    if activation not in GATES:
        raise ValueError(f"activation: expected one of {', '.join(GATES)}, got {activation!r}")
    eps = parse_eps("eps", eps)
    y = torch.empty(o.shape[0], o.shape[1] * o.shape[2], dtype=o.dtype, device=o.device)
    if o.device.type == "cpu":
        gated_rms_norm_cpu(o, z, weight, eps, y, gate_first=gate_first, activation=activation)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.norm.kernel import gated_rms_norm_triton

        gated_rms_norm_triton(o, z, weight, eps, y, gate_first=gate_first, activation=activation)
    return y
