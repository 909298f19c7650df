"""Order of the gated delta kernels on a GPU: short rows token by token, long rows in chunks.

Knows host bounds only; which rows decode, verify or replay is read on the device.
"""

import torch
from torch import Tensor

from deltaline_kernels.gated_delta.chunk import launch_chunk
from deltaline_kernels.gated_delta.exact_chunk import launch_exact_chunk
from deltaline_kernels.gated_delta.heads import Heads
from deltaline_kernels.gated_delta.recurrent import launch_recurrent
from deltaline_kernels.rows import Rows


def gated_delta_triton(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    o: Tensor,
    heads: Heads,
) -> None:
    """Write the rows' outputs to o `[T, HV, V]`; mutates `state` and `drafts`. Validated by `gated_delta`."""
    launch_recurrent(qkv, a, b, A_log, dt_bias, state, drafts, rows.short(), o, heads)
    launch = launch_exact_chunk if qkv.dtype == torch.float32 else launch_chunk
    launch(qkv, a, b, A_log, dt_bias, state, drafts, rows.long(), o, heads)
