"""Order of the gated delta kernels on a GPU: short rows at once or token by token, long rows in chunks.

Which rows decode, verify or replay is read on the device.
"""

import torch
from torch import Tensor

from deltaline_kernels.device.delta_rule.at_once import can_verify
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.gated_delta.chunk import launch_chunk
from deltaline_kernels.gated_delta.exact_chunk import launch_exact_chunk
from deltaline_kernels.gated_delta.recurrent import launch_recurrent
from deltaline_kernels.gated_delta.verify import launch_verify
from deltaline_kernels.rows import Rows, StateLines


def gated_delta_triton(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Write the rows' outputs to o `[T, HV, V]`; mutates `lines`. Arguments are validated by the caller."""
    short = rows.short()
    launch_short = launch_verify if can_verify(inputs, lines, short) else launch_recurrent
    launch_long = launch_exact_chunk if inputs.dtype == torch.float32 else launch_chunk
    launch_short(inputs, lines, short, o)
    launch_long(inputs, lines, rows.long(), o)
