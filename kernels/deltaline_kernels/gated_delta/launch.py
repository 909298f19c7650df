"""Order of the gated delta kernels on a GPU: short rows at once or token by token, long rows in chunks.

Knows host bounds only; which rows decode, verify or replay is read on the device.
"""

import torch
from torch import Tensor

from deltaline_kernels.gated_delta.chunk import launch_chunk
from deltaline_kernels.gated_delta.exact_chunk import launch_exact_chunk
from deltaline_kernels.gated_delta.heads import Heads
from deltaline_kernels.gated_delta.recurrent import launch_recurrent
from deltaline_kernels.gated_delta.verify import can_verify, launch_verify
from deltaline_kernels.rows import Rows


def gated_delta_triton(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    o: Tensor,
    heads: Heads,
    *,
    normalize: bool = True,
    line_shift: int = 0,
) -> None:
    """Write the rows' outputs to o `[T, HV, V]`; mutates `state` and `drafts`. Arguments are validated by the caller.

    A_log and dt_bias are both None where a and b are g and beta. Line i of `rows` is line i - line_shift of `state` and
    `drafts`: with 1, which line 0 of `rows` does not name, a caller may use all of its lines.
    """
    short = rows.short()
    launch_short = launch_verify if can_verify(qkv, drafts, heads, short) else launch_recurrent
    launch_long = launch_exact_chunk if qkv.dtype == torch.float32 else launch_chunk
    for launch, part in ((launch_short, short), (launch_long, rows.long())):
        launch(
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            state,
            drafts,
            part,
            o,
            heads,
            normalize=normalize,
            line_shift=line_shift,
        )
