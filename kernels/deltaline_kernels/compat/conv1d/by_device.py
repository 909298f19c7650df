"""The rows of an engine through the convolution's kernels, or its CPU path."""

from dataclasses import replace

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import EngineRows
from deltaline_kernels.compat.rows import LINE_SHIFT, check_lengths, check_offsets, place_rows, read_back
from deltaline_kernels.conv1d.cpu import causal_conv1d_cpu
from deltaline_kernels.conv1d.inputs import ConvInputs


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lines: Tensor | None,
    rows: EngineRows,
    y: Tensor,
    silu: bool,
    *,
    keep: bool = True,
) -> None:
    """Write the rows' outputs to y `[T, D]`, which may be x `[T, D]`; mutates `lines` `[L, columns, D]` if `keep`.

    weight `[W, D]`. Without lines only their dtype counts, and rows begin without a history.
    """
    if y.numel() == 0:
        return
    keep = keep and lines is not None
    if lines is None:
        lines = torch.empty((1, weight.shape[0] - 1, x.shape[1]), dtype=x.dtype, device=x.device)
    inputs = ConvInputs(x, weight, bias, lines, silu, LINE_SHIFT)
    if x.device.type == "cpu":
        convolve_cpu(inputs, rows, y, keep=keep)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.compat.conv1d.launch import convolve_triton

        convolve_triton(inputs, rows, y, keep=keep)


def convolve_cpu(inputs: ConvInputs, rows: EngineRows, y: Tensor, *, keep: bool) -> None:
    """Do what `convolve` does, on the CPU, with checked offsets, lengths and lines."""
    x, lines, width = inputs.x, inputs.lines, inputs.weight.shape[0]
    columns = lines.shape[1]
    check_offsets(rows, x.shape[0])
    live = [row for row in read_back(rows, columns, width) if not row.skipped]
    check_lengths(rows, live, columns, width)
    largest = max((max(row.write, -1 if row.first_column is None else row.read) for row in live), default=0)
    if keep and largest >= lines.shape[0]:  # slices would leave such lines out without a word
        raise IndexError(f"indices: expected lines below {lines.shape[0]}, got {largest}")
    inputs = replace(inputs, x=x.to(lines.dtype, copy=y.data_ptr() == x.data_ptr()))
    causal_conv1d_cpu(inputs, place_rows(rows, x.shape[0], x.device, columns, width, keep=keep), y)
