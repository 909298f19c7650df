"""The Mamba-1 recurrence over packed rows, token by token: the truth that the other paths are tested against.

    d = softplus(dt + dt_bias);  u = d x;  h = exp(d A) h + u B^T;  y = (h C + D x) silu(z)

The selective scan of "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", with A = -exp(A_log) of each
channel and state. Written for reading. Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.rows import Rows


def mamba1_reference(
    x: Tensor,
    dt: Tensor,
    BC: Tensor,
    z: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    *,
    num_groups: int = 1,
) -> Tensor:
    """Return y `[T, D]` in x.dtype; mutates `state` and `drafts` as `mamba1` does."""
    compute = torch.promote_types(x.dtype, torch.float32)
    channels, state_dim = state.shape[1:]
    wide = x.to(compute)
    step = F.softplus(dt.to(compute) + dt_bias.to(compute))  # (T, D)
    B, C = BC.to(compute).unflatten(-1, (2, num_groups, state_dim)).unbind(1)  # (T, G, S)
    rate = -A_log.to(compute).exp()  # (D, S)
    u = step * wide
    gate = torch.ones_like(wide) if z is None else F.silu(z.to(compute))

    y = torch.zeros_like(x)
    starts, reads, writes, committed, replayed, halves, _, *token_lines = rows.control.tolist()
    waypoints = rows.find_waypoints()
    for i in range(rows.num_rows):
        begin, end = starts[i], starts[i + 1]
        read, write, c, r = reads[i], writes[i], committed[i], replayed[i]
        if read == -1 and write == -1:
            continue
        h = state[read].to(compute) if read > 0 else torch.zeros_like(state[0], dtype=compute)  # (D, S)
        for draft in drafts[read, halves[i], :r].to(compute) if read > 0 else ():
            Bd, ud, step_d = draft.split((num_groups * state_dim, channels, channels))
            h = _advance(h, step_d, ud, Bd.unflatten(0, (num_groups, state_dim)), rate)
        if c == 0 and write > 0 and (r > 0 or write != read):
            state[write] = h.to(state.dtype)
        for t in range(begin, end):
            h = _advance(h, step[t], u[t], B[t], rate)
            seen = (h * _spread(C[t], channels)).sum(-1)
            y[t] = (seen + D.to(compute) * wide[t]) * gate[t]
            if token_lines and token_lines[t - begin][i] > 0:
                state[token_lines[t - begin][i]] = h.to(state.dtype)
            if t - begin + 1 in waypoints[i]:
                state[waypoints[i][t - begin + 1]] = h.to(state.dtype)
        if write <= 0:
            continue
        if c > 0:
            state[write] = h.to(state.dtype)
        else:
            record = torch.cat((B[begin:end].flatten(1), u[begin:end], step[begin:end]), dim=1)
            drafts[write, 1 - halves[i], : end - begin] = record.to(drafts.dtype)
    return y


def _advance(h: Tensor, step: Tensor, u: Tensor, B: Tensor, rate: Tensor) -> Tensor:
    """Return exp(step A) h + u B^T for h and A `[D, S]`, step and u `[D]`, B `[G, S]`."""
    return (step[:, None] * rate).exp() * h + u[:, None] * _spread(B, len(h))


def _spread(keys: Tensor, channels: int) -> Tensor:
    """Return the B or C of each channel, `[D, S]`, of those of the groups `[G, S]`."""
    return keys.repeat_interleave(channels // len(keys), dim=0)
