"""Order of the Mamba2 kernels on a GPU: short rows at once or token by token, long rows in chunks.

Which rows decode, verify or replay is read on the device.
"""

import torch
from torch import Tensor

from deltaline_kernels.mamba2.chunk import launch_chunk
from deltaline_kernels.mamba2.exact_chunk import launch_exact_chunk
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.mamba2.recurrent import launch_recurrent
from deltaline_kernels.mamba2.verify import can_verify, launch_verify
from deltaline_kernels.rows import Rows, StateLines


def mamba2_triton(inputs: MambaInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Write the rows' outputs to y `[T, H, P]`, which may be fp32; mutates `lines`. Checked by the caller."""
    short = rows.short()
    launch_short = launch_verify if can_verify(inputs, lines, short) else launch_recurrent
    launch_long = launch_exact_chunk if inputs.xBC.dtype == torch.float32 else launch_chunk
    launch_short(inputs, lines, short, y)
    launch_long(inputs, lines, rows.long(), y)
