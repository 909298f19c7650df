"""Attention over pages of keys on the CPU: vectorised PyTorch, row by row.

Rows of equal shapes are not put together: how a product is summed depends on how many there are of it, and a row's
result must not depend on which rows are with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaline_kernels.attention.inputs import Keys, Queries
from deltaline_kernels.rows import Rows

# Scores at once: long rows are cut in chunks of queries.
MOST_SCORES = 1 << 22


def flex_decode_cpu(
    queries: Queries, keys: Keys, rows: Rows, o: Tensor, lse: Tensor | None, *, from_zero: bool = False
) -> None:
    """Write the rows' outputs to o `[T, HQ, DV]`, and to lse `[T, HQ]`. Validated by the caller.

    `from_zero`: a row's queries are at the positions 0, 1 .., wherever its keys end.
    """
    q, gate, blocks, page_table = queries.q, queries.gate, queries.blocks, keys.page_table
    assert page_table is not None
    page_size = max(1, keys.page_size)
    starts, _, lines, _, _, _, positions, *_ = rows.control.tolist()
    for i, line in enumerate(lines[: rows.num_rows]):
        begin, n = starts[i], starts[i + 1] - starts[i]
        if line < 0:
            o[begin : begin + n] = 0
            if lse is not None:
                lse[begin : begin + n] = -torch.inf
        if line < 0 or n <= 0:
            continue
        position = 0 if from_zero else positions[i]
        low, high = 0, positions[i] + n
        if blocks is None:
            low, high = queries.modifiers.bounds(line, position, position + n - 1, high)
        first_page, behind = low // page_size, -(-high // page_size)
        pages = page_table[line, first_page:behind].long()
        inside = slice(low - first_page * page_size, high - first_page * page_size)
        k = keys.k[pages].flatten(0, 1)[inside].float().transpose(0, 1)
        if keys.v is None:
            v = k[..., : queries.heads.value_dim]
        else:
            v = keys.v[pages].flatten(0, 1)[inside].float().transpose(0, 1)
        kv = torch.arange(low, high)
        step = max(1, MOST_SCORES // (q.shape[1] * max(1, high - low)))
        for first in range(0, n, step):
            t = torch.arange(first, min(n, first + step))
            tokens = slice(begin + first, begin + first + len(t))
            kinds = None if blocks is None else blocks.expand(line, t, kv)
            mine = q[tokens].transpose(0, 1).to(torch.float32, copy=True)  # where it lies must not matter either
            found, total = _attend(queries, mine, k, v, line, position + t, kv, kinds)
            if gate is not None:
                found *= gate[tokens].transpose(0, 1).float().sigmoid()
            o[tokens] = found.transpose(0, 1).to(o.dtype)
            if lse is not None:
                lse[tokens] = total.transpose(0, 1)


def _attend(
    queries: Queries, q: Tensor, k: Tensor, v: Tensor, line: int, q_idx: Tensor, kv: Tensor, kinds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs `[HQ, n, DV]` and the logarithms of their sums `[HQ, n]`.

    q `[HQ, n, D]`, k and v `[HKV, keys, *]`.
    """
    heads, sinks = queries.heads, queries.sinks
    grouped = q.unflatten(0, (heads.num_keys, heads.group)).flatten(1, 2)  # (HKV, G * n, D)
    s = (grouped @ k.transpose(1, 2) * heads.scale).view(*q.shape[:2], -1)  # (HQ, n, keys)
    b, h = torch.full((1, 1, 1), line), torch.arange(heads.num_queries)[:, None, None]
    s = queries.modifiers.modify(s, b, h, q_idx[:, None], kv, kinds)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:2], 1), -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1)
        top = torch.maximum(top, sink)
    safe = torch.where(top == -torch.inf, 0.0, top)
    p = (s - safe).exp_()
    total = p.sum(-1, keepdim=True)
    o = (p.view(*grouped.shape[:2], -1) @ v).view(*q.shape[:2], -1)
    if sinks is not None:
        total = total + (sink - safe).exp()
    o /= torch.where(total == 0, 1.0, total)
    return o, (safe + total.log())[..., 0]
