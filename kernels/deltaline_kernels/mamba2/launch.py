"""Order of the Mamba2 kernels on a GPU: short rows at once or token by token, long rows in chunks.

Knows host bounds only; which rows decode, verify or replay is read on the device.
"""

import torch
from torch import Tensor

from deltaline_kernels.mamba2.chunk import launch_chunk
from deltaline_kernels.mamba2.exact_chunk import launch_exact_chunk
from deltaline_kernels.mamba2.heads import Heads
from deltaline_kernels.mamba2.recurrent import launch_recurrent
from deltaline_kernels.mamba2.verify import can_verify, launch_verify
from deltaline_kernels.rows import Rows


def mamba2_triton(
    xBC: Tensor,
    dt: Tensor,
    rate: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    y: Tensor,
    heads: Heads,
    *,
    log_rate: bool = True,
    softplus: bool = True,
    line_shift: int = 0,
) -> None:
    """Write the rows' outputs to y `[T, H, P]`, which may be fp32; mutates `state` and `drafts`. Checked by the caller.

    Args:
        rate: `[H]`, A_log, or without `log_rate` the rate of the decay itself, at most 0.
        D, dt_bias: `[H]`; None is zero.
        softplus: False: the time step is dt + dt_bias, of short and of fp32 rows not clamped.
        line_shift: line i of `rows` is line i - line_shift of `state` and `drafts`: with 1, which line 0 of `rows` does
            not name, a caller may use all of its lines.
    """
    short = rows.short()
    launch_short = launch_verify if can_verify(xBC, drafts, heads, short) else launch_recurrent
    launch_long = launch_exact_chunk if xBC.dtype == torch.float32 else launch_chunk
    for launch, part in ((launch_short, short), (launch_long, rows.long())):
        launch(
            xBC,
            dt,
            rate,
            D,
            dt_bias,
            state,
            drafts,
            part,
            y,
            heads,
            log_rate=log_rate,
            softplus=softplus,
            line_shift=line_shift,
        )
