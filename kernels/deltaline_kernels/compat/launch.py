"""Sends the rows of an engine to the kernel for their length. Does not know what the kernels compute."""

import torch
from torch import Tensor

from deltaline_kernels.compat.kernel import LINE_SHIFT, build_rows
from deltaline_kernels.compat.rows import EngineRows
from deltaline_kernels.conv1d.prefill import launch_prefill
from deltaline_kernels.conv1d.update import MAX_TOKENS, Indices, launch_update


def convolve_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor | None, rows: EngineRows, y: Tensor, *, silu: bool
) -> None:
    """Write the rows' outputs to y `[T, D]`, which may be x `[T, D]`; mutates `lines` `[L, columns, D]`."""
    width, channels = weight.shape
    keep = lines is not None
    if lines is None:
        # Its dtype counts; its contents do not.
        lines = torch.empty((1, width - 1, channels), dtype=x.dtype, device=x.device)
    columns = lines.shape[1]
    most = rows.most_tokens(columns, width)
    if keep and rows.history is True and rows.longest <= (MAX_TOKENS if most is None else min(MAX_TOKENS, most)):
        launch_update(x, weight, bias, lines, _indices(rows, x.device), y, silu=silu)
        return
    # Only an update reads all of a row before it writes: elsewhere others still need what would be overwritten.
    result = torch.empty_like(y) if y.data_ptr() == x.data_ptr() else y
    built = build_rows(rows, x.shape[0], columns, width, x.device, keep=keep)
    launch_prefill(x, weight, bias, lines, built, (result,), silu=silu, line_shift=LINE_SHIFT)
    if result is not y:
        y.copy_(result)


def _indices(rows: EngineRows, device: torch.device) -> Indices:
    """Return the rows as the update kernel takes them: without a launch where the lines are given."""
    if rows.read_line is None or rows.write_line is None:
        read = write = torch.arange(rows.num_rows, dtype=torch.int32, device=device)
    else:
        read, write = rows.read_line, rows.write_line
        if read.stride() != write.stride():
            read, write = read.contiguous(), write.contiguous()
    return Indices(read, write, rows.longest, rows.starts, rows.num_accepted, rows.pad)
