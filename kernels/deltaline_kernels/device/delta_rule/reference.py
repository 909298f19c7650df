"""The delta rule over packed rows, token by token: the truth that the other paths are tested against.

    h = exp(g) h;  u = beta (v - h k);  h += u k^T;  o = h q

Written for reading. Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
from torch import Tensor

from deltaline_kernels.rows import Rows


def delta_rule_reference(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    *,
    num_key_heads: int,
    scale: float | None,
    eps: float,
    normalize: bool,
) -> Tensor:
    """Return o `[T, HV, V]` in qkv.dtype; mutates `state` and `drafts` as `gated_delta` and `kda` do.

    Args:
        g: `[T, HV, 1]`, the log decay of a head, or `[T, HV, K]`, those of its key channels; beta: `[T, HV]`.
    """
    compute = torch.promote_types(qkv.dtype, torch.float32)
    num_value_heads, value_dim, key_dim = state.shape[1:]
    group = num_value_heads // num_key_heads
    keys, values = num_key_heads * key_dim, num_value_heads * value_dim
    scale = key_dim**-0.5 if scale is None else scale

    q, k, v = qkv.to(compute).split((keys, keys, values), dim=-1)
    q, k = (x.unflatten(-1, (num_key_heads, key_dim)) for x in (q, k))  # (T, H, K)
    if normalize:
        q, k = _normalise(q, eps), _normalise(k, eps)
    q = q * scale
    v = v.unflatten(-1, (num_value_heads, value_dim))  # (T, HV, V)
    u = torch.empty_like(v)

    o = torch.zeros(qkv.shape[0], num_value_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    starts, reads, writes, committed, replayed, halves, _, *token_lines = rows.control.tolist()
    waypoints = rows.find_waypoints()
    for i in range(rows.num_rows):
        begin, end = starts[i], starts[i + 1]
        read, write, c, r = reads[i], writes[i], committed[i], replayed[i]
        if read == -1 and write == -1:
            continue
        h = state[read].to(compute) if read > 0 else torch.zeros_like(state[0], dtype=compute)  # (HV, V, K)
        for draft in drafts[read, halves[i], :r].to(compute) if read > 0 else ():
            kd, ud, gd = draft.tensor_split((keys, keys + values))
            kd = kd.unflatten(0, (num_key_heads, key_dim)).repeat_interleave(group, dim=0)
            h = _decay(h, gd.unflatten(0, (num_value_heads, -1)))
            h = h + _outer(ud.unflatten(0, (num_value_heads, value_dim)), kd)
        if c == 0 and write > 0 and (r > 0 or write != read):
            state[write] = h.to(state.dtype)
        for t in range(begin, end):
            kt = k[t].repeat_interleave(group, dim=0)
            h = _decay(h, g[t])
            u[t] = beta[t][:, None] * (v[t] - (h @ kt[..., None])[..., 0])
            h = h + _outer(u[t], kt)
            o[t] = (h @ q[t].repeat_interleave(group, dim=0)[..., None])[..., 0]
            if token_lines and token_lines[t - begin][i] > 0:
                state[token_lines[t - begin][i]] = h.to(state.dtype)
            if t - begin + 1 in waypoints[i]:
                state[waypoints[i][t - begin + 1]] = h.to(state.dtype)
        if write <= 0:
            continue
        if c > 0:
            state[write] = h.to(state.dtype)
        else:
            record = torch.cat([x[begin:end].flatten(1) for x in (k, u, g)], dim=1)
            drafts[write, 1 - halves[i], : end - begin] = record.to(drafts.dtype)
    return o


def _normalise(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)


def _decay(h: Tensor, g: Tensor) -> Tensor:
    return g.exp()[:, None] * h


def _outer(u: Tensor, k: Tensor) -> Tensor:
    return u[..., None] * k[:, None, :]
