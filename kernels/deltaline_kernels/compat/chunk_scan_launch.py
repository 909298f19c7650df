"""Sends the sequences of a chunk scan to the Triton kernels of Mamba2. Never waits for the device."""

import torch
from torch import Tensor

from deltaline_kernels.compat.chunk_scan_rows import ScanTokens
from deltaline_kernels.compat.kernel import LINE_SHIFT, build_rows
from deltaline_kernels.compat.rows import EngineRows
from deltaline_kernels.mamba2.launch import mamba2_triton
from deltaline_kernels.rows import Rows


def scan_triton(tokens: ScanTokens, states: Tensor, rows: EngineRows, y: Tensor) -> None:
    """Do what `scan` of `chunk_scan_rows` does, on a GPU."""
    if y.numel() == 0 or rows.num_rows == 0:
        return
    # Nothing is speculative, so that the columns of a line and the width of a filter do not count.
    built = build_rows(rows, y.shape[0], columns=0, width=1, device=y.device, keep=True)
    placed = Rows(built.control, 0, 1, rows.longest)
    # No row verifies: drafts are neither read nor written.
    drafts = torch.empty((1, 2, 1, tokens.heads.record), dtype=torch.float32, device=y.device)
    mamba2_triton(
        tokens.xBC,
        tokens.dt,
        tokens.A,
        tokens.D,
        tokens.dt_bias,
        states,
        drafts,
        placed,
        y,
        tokens.heads,
        log_rate=False,
        softplus=tokens.softplus,
        line_shift=LINE_SHIFT,
    )
