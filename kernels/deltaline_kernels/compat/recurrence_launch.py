"""Sends the rows of an engine to the Triton kernels of a recurrence. Never waits for the device."""

import torch
from torch import Tensor

from deltaline_kernels.compat.kernel import LINE_SHIFT, build_rows
from deltaline_kernels.compat.recurrence import Operands
from deltaline_kernels.compat.rows import EngineRows
from deltaline_kernels.rows import Rows


def advance_triton(operands: Operands, state: Tensor, rows: EngineRows, *, keep: bool, chunked: bool) -> Tensor:
    """Do what `advance` of `recurrence` does, on a GPU."""
    o = operands.empty_output()
    if o.numel() == 0 or rows.num_rows == 0:
        return o
    # Nothing is speculative, so that the columns of a line and the width of a filter do not count.
    built = build_rows(rows, operands.num_tokens, columns=0, width=1, device=operands.device, keep=keep)
    placed = Rows(built.control, 0 if chunked else rows.num_rows, rows.longest, rows.longest)
    # No row verifies: drafts are neither read nor written.
    drafts = torch.empty((1, 2, 1, operands.record), dtype=torch.float32, device=operands.device)
    operands.launch(state, drafts, placed, o, LINE_SHIFT)
    return o
