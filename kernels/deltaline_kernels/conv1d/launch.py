"""Sends the rows of a batch to the kernel for their length. Does not know what the kernels compute."""

from torch import Tensor

from deltaline_kernels.conv1d.prefill import launch_prefill
from deltaline_kernels.conv1d.update import MAX_TOKENS, launch_update
from deltaline_kernels.rows import Rows


def causal_conv1d_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lines: Tensor,
    rows: Rows,
    outputs: tuple[Tensor, ...],
    *,
    silu: bool,
) -> None:
    """Write the rows' outputs to `outputs`; mutates `lines`. Arguments are validated by `causal_conv1d`.

    Short rows go to the update kernel; long ones go to the prefill kernel, and so do rows with more than MAX_TOKENS
    tokens and those whose output is split.
    """
    short = rows.short()
    if short.num_rows > 0 and short.max_length <= MAX_TOKENS and len(outputs) == 1:
        launch_update(x, weight, bias, lines, short, *outputs, silu=silu)
        rows = rows.long()
    launch_prefill(x, weight, bias, lines, rows, outputs, silu=silu)
