"""Causal convolution over packed rows, token by token: the truth that the other paths are tested against.

Written for reading. Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.rows import Rows


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lines: Tensor,
    rows: Rows,
    *,
    activation: str | None = "silu",
) -> Tensor:
    """Return y `[T, D]` in x.dtype; mutates `lines` as `causal_conv1d` does."""
    compute = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    width, channels = weight.shape
    w = weight.to(compute)
    history = width - 1
    starts, reads, writes, committed, replayed, *_ = rows.control.tolist()
    waypoints = rows.find_waypoints()
    for i in range(rows.num_rows):
        begin, end = starts[i], starts[i + 1]
        read, write, c, r = reads[i], writes[i], committed[i], replayed[i]
        if read == -1 and write == -1:
            continue
        if read > 0:
            before = lines[read, r : r + history].clone()
        else:
            before = torch.zeros(history, channels, dtype=lines.dtype, device=x.device)
        full = torch.cat((before.to(compute), x[begin:end].to(compute)))  # (history + n, D)
        for t in range(end - begin):
            total = (w * full[t : t + width]).sum(0)
            if bias is not None:
                total = total + bias.to(compute)
            y[begin + t] = F.silu(total) if activation == "silu" else total
        if write > 0:
            kept = full[c:]
            lines[write, : kept.shape[0]] = kept.to(lines.dtype)
        for done, line in waypoints[i].items():
            lines[line, :history] = full[done : done + history].to(lines.dtype)
    return y
