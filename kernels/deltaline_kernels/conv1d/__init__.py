"""Causal depthwise convolution over packed rows, with the history of each row kept in a line.

Validates and picks the path by device. Does not know what the channels mean.
"""

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_CONV_WIDTH, MIN_CONV_WIDTH, check_tensor
from deltaline_kernels.conv1d.cpu import causal_conv1d_cpu
from deltaline_kernels.conv1d.reference import causal_conv1d_reference
from deltaline_kernels.rows import Rows

__all__ = ["causal_conv1d", "causal_conv1d_reference"]


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor, rows: Rows, *, activation: str | None = "silu"
) -> Tensor:
    """Convolve each row behind the history in its read line; keep the last W-1 tokens (VERIFY: and all drafts).

    Args:
        x: `[T, D]` fp32, bf16 or fp16; a row stride is fine.
        weight: `[W, D]`, W 2..6, contiguous, fp32 or x.dtype. bias: `[D]` likewise, or None.
        lines: `[L, columns, D]` in x.dtype, contiguous, columns >= W-1 + max draft. Mutated: the first
            W-1 + n - num_committed columns of each write line.
        activation: "silu" or None.

    Returns:
        `[T, D]` in x.dtype; zero for skipped rows, unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    _check(x, weight, bias, lines, rows, activation)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    silu = activation == "silu"
    if x.device.type == "cpu":
        causal_conv1d_cpu(x, weight, bias, lines, rows, y, silu=silu)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.conv1d.kernel import causal_conv1d_triton

        causal_conv1d_triton(x, weight, bias, lines, rows, y, silu=silu)
    return y


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor, rows: Rows, activation: str | None) -> None:
    device = x.device
    check_tensor("x", x, (None, None), ACTIVATIONS, device, row_stride=True)
    weights = (torch.float32, x.dtype)
    channels = x.shape[1]
    check_tensor("weight", weight, (None, channels), weights, device)
    width = weight.shape[0]
    if not MIN_CONV_WIDTH <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"weight: expected a width of {MIN_CONV_WIDTH}..{MAX_CONV_WIDTH}, got {width}")
    if bias is not None:
        check_tensor("bias", bias, (channels,), weights, device)
    check_tensor("lines", lines, (None, None, channels), (x.dtype,), device)
    if lines.shape[1] < width - 1:
        raise ValueError(f"lines: expected at least {width - 1} columns, got {lines.shape[1]}")
    if rows.control.device != device:
        raise ValueError(f"rows: expected device {device}, got {rows.control.device}")
    if activation not in ("silu", None):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
