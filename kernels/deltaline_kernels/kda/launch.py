"""Order of the KDA kernels on a GPU: short rows at once or token by token, long ones in chunks where chunks have them.

Which rows decode, verify or replay is read on the device.
"""

import torch
from torch import Tensor

from deltaline_kernels.device.delta_rule.at_once import can_verify
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.kda.chunk import LARGEST_KEY, launch_chunk
from deltaline_kernels.kda.recurrent import launch_recurrent
from deltaline_kernels.kda.verify import launch_verify
from deltaline_kernels.rows import Rows, StateLines


def kda_triton(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Write the rows' outputs to o `[T, HV, V]`; mutates `lines`. Arguments are validated by the caller."""
    in_chunks = inputs.dtype != torch.float32 and inputs.heads.key_dim <= LARGEST_KEY
    short = rows.short()
    launch_short = launch_verify if can_verify(inputs, lines, short) else launch_recurrent
    launch_short(inputs, lines, short, o)
    launch_long = launch_chunk if in_chunks else launch_recurrent
    launch_long(inputs, lines, rows.long(), o)
