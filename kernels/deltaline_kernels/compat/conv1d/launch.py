"""Sends the rows of an engine to the convolution's kernel for their length."""

from dataclasses import replace

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import EngineRows
from deltaline_kernels.compat.build_rows import build_rows
from deltaline_kernels.conv1d.inputs import ConvInputs
from deltaline_kernels.conv1d.prefill import launch_prefill
from deltaline_kernels.conv1d.update import MAX_TOKENS, Indices, launch_update


def convolve_triton(inputs: ConvInputs, rows: EngineRows, y: Tensor, *, keep: bool) -> None:
    """Write the rows' outputs to y `[T, D]`, which may be x; mutates the lines if `keep`."""
    x, width, columns = inputs.x, inputs.weight.shape[0], inputs.lines.shape[1]
    most = rows.most_tokens(columns, width)
    if keep and rows.history is True and rows.longest <= (MAX_TOKENS if most is None else min(MAX_TOKENS, most)):
        # Its rows name the lines themselves.
        launch_update(replace(inputs, line_shift=0), _indices(rows, x.device), y)
        return
    # Only an update reads all of a row before it writes: elsewhere others still need what would be overwritten.
    result = torch.empty_like(y) if y.data_ptr() == x.data_ptr() else y
    launch_prefill(inputs, build_rows(rows, x.shape[0], x.device, columns, width, keep=keep), (result,))
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
