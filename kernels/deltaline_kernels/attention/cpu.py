"""Attention over pages of keys on the CPU: vectorised PyTorch over rows of equal tokens and the same range of keys.

A row's result does not depend on which rows are with it: their shapes are its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaline_kernels.attention.blocks import BlockLists
from deltaline_kernels.attention.heads import Heads
from deltaline_kernels.attention.modifiers import Modifiers
from deltaline_kernels.rows import Rows

# Scores at once: long rows are cut in chunks of queries.
MOST_SCORES = 1 << 22

# Tokens, position of the first one, the range of their keys, and a number of those that are computed alone.
Shape = tuple[int, int, int, int, int]


def flex_decode_cpu(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    rows: Rows,
    modifiers: Modifiers,
    sinks: Tensor | None,
    gate: Tensor | None,
    o: Tensor,
    lse: Tensor | None,
    heads: Heads,
    blocks: BlockLists | None = None,
    *,
    from_zero: bool = False,
) -> None:
    """Write the rows' outputs to o `[T, HQ, DV]`, and to lse `[T, HQ]`. Validated by the caller.

    `from_zero`: a row's queries are at the positions 0, 1 .., wherever its keys end.
    """
    page_size = max(1, k_pages.shape[1])
    groups = _group(rows, modifiers, o, lse, blocks is not None, from_zero)
    for (n, position, low, high, _), members in groups.items():
        lines = torch.tensor([line for _, line in members])
        first_page, behind = low // page_size, -(-high // page_size)
        pages = page_table[lines, first_page:behind].long().flatten()
        k, v = (
            pool[pages].unflatten(0, (len(members), behind - first_page)).flatten(1, 2)  # (B, keys, HKV, D)
            for pool in (k_pages, v_pages)
        )
        begin, end = low - first_page * page_size, high - first_page * page_size
        k, v = k[:, begin:end].float().transpose(1, 2), v[:, begin:end].float().transpose(1, 2)
        kv = torch.arange(low, high)
        starts = torch.tensor([start for start, _ in members])
        step = max(1, MOST_SCORES // (len(members) * heads.num_queries * max(1, high - low)))
        for first in range(0, n, step):
            i = torch.arange(first, min(n, first + step))
            tokens = (starts[:, None] + i).flatten()
            mine = q[tokens].unflatten(0, (len(members), -1)).transpose(1, 2).float()  # (B, HQ, n, D)
            kinds = None if blocks is None else blocks.expand(members[0][1], i, kv)
            found, total = _attend(mine, k, v, lines, position + i, kv, modifiers, sinks, heads, kinds)
            if gate is not None:
                found *= gate[tokens].view(len(members), -1, *gate.shape[1:]).transpose(1, 2).float().sigmoid()
            o[tokens] = found.transpose(1, 2).flatten(0, 1).to(o.dtype)
            if lse is not None:
                lse[tokens] = total.transpose(1, 2).flatten(0, 1)


def _group(
    rows: Rows, modifiers: Modifiers, o: Tensor, lse: Tensor | None, alone: bool, from_zero: bool
) -> dict[Shape, list[tuple[int, int]]]:
    """Return first token and line of the rows by their shapes; zero the outputs of skipped ones.

    `alone`: each row for itself, and all of its keys.
    """
    found: dict[Shape, list[tuple[int, int]]] = {}
    starts, _, lines, _, _, _, positions = rows.control.tolist()
    for i in range(rows.num_rows):
        begin, n, line, position = starts[i], starts[i + 1] - starts[i], lines[i], positions[i]
        if line < 0:
            o[begin : begin + n] = 0
            if lse is not None:
                lse[begin : begin + n] = -torch.inf
        elif n > 0:
            first = 0 if from_zero else position
            low, high = 0, position + n
            if not alone:
                low, high = modifiers.bounds(line, first, first + n - 1, high)
            found.setdefault((n, first, low, high, i if alone else 0), []).append((begin, line))
    return found


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lines: Tensor,
    q_idx: Tensor,
    kv: Tensor,
    modifiers: Modifiers,
    sinks: Tensor | None,
    heads: Heads,
    kinds: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, HQ, n, DV]` and the logarithms of their sums `[B, HQ, n]`.

    q `[B, HQ, n, D]`, k and v `[B, HKV, keys, *]`.
    """
    grouped = q.unflatten(1, (heads.num_keys, heads.group)).flatten(2, 3)  # (B, HKV, G * n, D)
    s = (grouped @ k.transpose(2, 3) * heads.scale).view(*q.shape[:3], -1)  # (B, HQ, n, keys)
    b, h = lines[:, None, None, None], torch.arange(heads.num_queries)[:, None, None]
    s = modifiers.modify(s, b, h, q_idx[:, None], kv, kinds)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:3], 1), -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(-1, 1, 1)
        top = torch.maximum(top, sink)
    safe = torch.where(top == -torch.inf, 0.0, top)
    p = (s - safe).exp_()
    total = p.sum(-1, keepdim=True)
    o = (p.view(*grouped.shape[:3], -1) @ v).view(*q.shape[:3], -1)
    if sinks is not None:
        total = total + (sink - safe).exp()
    o /= torch.where(total == 0, 1.0, total)
    return o, (safe + total.log())[..., 0]
