"""Causal depthwise convolution over packed rows, with the history of each row kept in a line."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_CONV_WIDTH, MIN_CONV_WIDTH, check_tensor
from deltaline_kernels.conv1d.cpu import causal_conv1d_cpu
from deltaline_kernels.conv1d.inputs import ConvInputs
from deltaline_kernels.conv1d.reference import causal_conv1d_reference
from deltaline_kernels.operators import operator
from deltaline_kernels.rows import Rows, check_rows, check_waypoints

__all__ = ["causal_conv1d", "causal_conv1d_reference"]

MAX_PARTS = 3


def _fake(x: Tensor, split: Sequence[int] | None, **_: Any) -> Tensor | tuple[Tensor, ...]:
    if split is None:
        return x.new_empty(x.shape)
    return tuple(x.new_empty(x.shape[0], size) for size in split)


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lines: Tensor,
    rows: Rows,
    *,
    activation: str | None = "silu",
    split: None = None,
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lines: Tensor,
    rows: Rows,
    *,
    activation: str | None = "silu",
    split: Sequence[int],
) -> tuple[Tensor, ...]: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lines: Tensor,
    rows: Rows,
    *,
    activation: str | None = "silu",
    split: Sequence[int] | None,
) -> Tensor | tuple[Tensor, ...]: ...
@operator(_fake, mutates=["lines"], results=MAX_PARTS)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lines: Tensor,
    rows: Rows,
    *,
    activation: str | None = "silu",
    split: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Convolve each row behind the history in its read line; keep the last W-1 tokens (VERIFY: and all drafts).

        full = cat(lines[read_line, r : r+W-1], x[row]),  r = num_replayed, c = num_committed, n = the row's length
        y[t] = act(bias + sum_j weight[j] full[t+j]);     lines[write_line, 0 : W-1+n-c] = full[c : W-1+n]

    The line of a waypoint behind c tokens of a row gets full[c : W-1+c], its other columns stay.

    Args:
        x: `[T, D]` fp32, bf16 or fp16; a row stride is fine.
        weight: `[W, D]`, W 2..6, contiguous, fp32 or x.dtype. bias: `[D]` likewise, or None.
        lines: `[L, columns, D]` in x.dtype, a line stride is fine, columns >= W-1 + max draft. Mutated: the first
            W-1 + n - num_committed columns of each write line, and W-1 of the lines of waypoints.
        activation: "silu" or None.
        split: sizes of one to three parts of the channels, for example those of q, k and v.

    Returns:
        `[T, D]` in x.dtype, or with `split` one contiguous `[T, size]` for each part; zero for skipped rows,
        unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    _check(x, weight, bias, lines, rows, activation)
    sizes = (x.shape[1],) if split is None else _parse_split(split, x.shape[1])
    inputs = ConvInputs(x, weight, bias, lines, activation == "silu")
    outputs: tuple[Tensor, ...]
    if x.device.type == "cpu":
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        causal_conv1d_cpu(inputs, rows, y)
        outputs = (
            (y,)
            if split is None
            else tuple(part.clone(memory_format=torch.contiguous_format) for part in y.split(sizes, dim=1))
        )
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.conv1d.launch import causal_conv1d_triton

        outputs = tuple(torch.empty(x.shape[0], size, dtype=x.dtype, device=x.device) for size in sizes)
        causal_conv1d_triton(inputs, rows, outputs)
    return outputs[0] if split is None else outputs


def _parse_split(split: Sequence[int], channels: int) -> tuple[int, ...]:
    """Return the sizes of the parts."""
    if not isinstance(split, Sequence) or not all(isinstance(size, int) for size in split):
        raise TypeError(f"split: expected a sequence of integers or None, got {split!r}")
    sizes = tuple(split)
    if not 1 <= len(sizes) <= MAX_PARTS or min(sizes) < 0 or sum(sizes) != channels:
        raise ValueError(f"split: expected 1 to {MAX_PARTS} sizes that add up to {channels} channels, got {split}")
    return sizes


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor, rows: Rows, activation: str | None) -> None:
    check_tensor("x", x, (None, None), ACTIVATIONS, None, row_stride=True)
    device, weights, channels = x.device, (torch.float32, x.dtype), x.shape[1]
    check_tensor("weight", weight, (None, channels), weights, device)
    width = weight.shape[0]
    if not MIN_CONV_WIDTH <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"weight: expected a width of {MIN_CONV_WIDTH}..{MAX_CONV_WIDTH}, got {width}")
    if bias is not None:
        check_tensor("bias", bias, (channels,), weights, device)
    check_tensor("lines", lines, (None, None, channels), (x.dtype,), device, row_stride=True)
    if lines.shape[1] < width - 1:
        raise ValueError(f"lines: expected at least {width - 1} columns, got {lines.shape[1]}")
    check_rows(rows, device)
    check_waypoints(rows, x.shape[0])
    if activation not in ("silu", None):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
