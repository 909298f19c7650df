"""Order of the KDA kernels on a GPU: short rows at once or token by token, long ones in chunks where chunks have them.

Which rows decode, verify or replay is read on the device.
"""

import torch
from torch import Tensor

from deltaline_kernels.device.delta_rule import recurrent
from deltaline_kernels.device.delta_rule.at_once import can_verify
from deltaline_kernels.device.delta_rule.inputs import MANY_HEADS, DeltaInputs
from deltaline_kernels.kda import decode
from deltaline_kernels.kda import recurrent as keyed
from deltaline_kernels.kda.chunk import LARGEST_KEY, launch_chunk
from deltaline_kernels.kda.verify import launch_verify
from deltaline_kernels.rows import Rows, StateLines

# For the moment: channels handed out (True), or found by every row (False).
HANDED_OUT = True
# For the moment: decodes of many heads walk through the state of a head.
WALKS = True


def kda_triton(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Write the rows' outputs to o `[T, HV, V]`; mutates `lines`. Arguments are validated by the caller."""
    in_chunks = inputs.dtype != torch.float32 and inputs.heads.key_dim <= LARGEST_KEY
    short = rows.short()
    launch_recurrent = keyed.launch_recurrent if HANDED_OUT else recurrent.launch_recurrent
    launch_short = launch_verify if can_verify(inputs, lines, short) else launch_recurrent
    if WALKS and short.num_rows * inputs.heads.num_value_heads >= MANY_HEADS and decode.can_decode(inputs, short):
        launch_short = decode.launch_decode
    launch_short(inputs, lines, short, o)
    launch_long = launch_chunk if in_chunks else launch_recurrent
    launch_long(inputs, lines, rows.long(), o)
