"""The Mamba2 recurrence over packed rows, token by token: the truth that the other paths are tested against.

    d = clamp(softplus(dt + dt_bias));  g = -exp(A_log) d;  u = d x;  h = exp(g) h + u B^T;  y = h C + D x

Written for reading. Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.rows import Rows


def mamba2_reference(
    xBC: Tensor,
    dt: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    *,
    num_groups: int,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Return y `[T, H, P]` in xBC.dtype; mutates `state` and `drafts` as `mamba2` does."""
    compute = torch.promote_types(xBC.dtype, torch.float32)
    num_heads, head_dim, state_dim = state.shape[1:]
    group = num_heads // num_groups
    values, keys = num_heads * head_dim, num_groups * state_dim

    x, B, C = xBC.to(compute).split((values, keys, keys), dim=-1)
    x = x.unflatten(-1, (num_heads, head_dim))  # (T, H, P)
    B, C = (part.unflatten(-1, (num_groups, state_dim)) for part in (B, C))  # (T, G, S)
    step = F.softplus(dt.to(compute) + dt_bias.to(compute)).clamp(*dt_limit)  # (T, H)
    g = -A_log.to(compute).exp() * step
    u = step[..., None] * x

    y = torch.zeros(xBC.shape[0], num_heads, head_dim, dtype=xBC.dtype, device=xBC.device)
    starts, reads, writes, committed, replayed, halves, _, *token_lines = rows.control.tolist()
    waypoints = rows.find_waypoints()
    for i in range(rows.num_rows):
        begin, end = starts[i], starts[i + 1]
        read, write, c, r = reads[i], writes[i], committed[i], replayed[i]
        if read == -1 and write == -1:
            continue
        h = state[read].to(compute) if read > 0 else torch.zeros_like(state[0], dtype=compute)  # (H, P, S)
        for draft in drafts[read, halves[i], :r].to(compute) if read > 0 else ():
            Bd, ud, gd = draft.split((keys, values, num_heads))
            h = _advance(h, gd, ud.unflatten(0, (num_heads, head_dim)), Bd.unflatten(0, (num_groups, state_dim)))
        if c == 0 and write > 0 and (r > 0 or write != read):
            state[write] = h.to(state.dtype)
        for t in range(begin, end):
            h = _advance(h, g[t], u[t], B[t])
            seen = (h @ C[t].repeat_interleave(group, dim=0)[..., None])[..., 0]
            y[t] = seen + D.to(compute)[:, None] * x[t]
            if token_lines and token_lines[t - begin][i] > 0:
                state[token_lines[t - begin][i]] = h.to(state.dtype)
            if t - begin + 1 in waypoints[i]:
                state[waypoints[i][t - begin + 1]] = h.to(state.dtype)
        if write <= 0:
            continue
        if c > 0:
            state[write] = h.to(state.dtype)
        else:
            record = torch.cat((B[begin:end].flatten(1), u[begin:end].flatten(1), g[begin:end]), dim=1)
            drafts[write, 1 - halves[i], : end - begin] = record.to(drafts.dtype)
    return y


def _advance(h: Tensor, g: Tensor, u: Tensor, B: Tensor) -> Tensor:
    """Return exp(g) h + u B^T for h `[H, P, S]`, g `[H]`, u `[H, P]`, B `[G, S]`."""
    B = B.repeat_interleave(h.shape[0] // B.shape[0], dim=0)
    return g.exp()[:, None, None] * h + u[..., None] * B[:, None, :]
