"""Sends the rows of a batch to the kernel for their length."""

from torch import Tensor

from deltaline_kernels.conv1d.inputs import ConvInputs
from deltaline_kernels.conv1d.prefill import launch_prefill
from deltaline_kernels.conv1d.update import MAX_TOKENS, launch_update
from deltaline_kernels.rows import Rows


def causal_conv1d_triton(inputs: ConvInputs, rows: Rows, outputs: tuple[Tensor, ...]) -> None:
    """Write the rows' outputs to `outputs`; mutates the lines.

    Short rows go to the update kernel; long ones go to the prefill kernel, and so do rows with more than MAX_TOKENS
    tokens and those whose output is split.
    """
    short = rows.short()
    if short.num_rows > 0 and short.max_length <= MAX_TOKENS and len(outputs) == 1:
        launch_update(inputs, short, *outputs)
        rows = rows.long()
    launch_prefill(inputs, rows, outputs)
