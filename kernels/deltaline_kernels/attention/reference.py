"""Attention over pages of keys, row by row and head by head: the truth that the other paths are tested against.

    s = modified(scale q.k);  p = exp(s - max s);  o = sum p v / (sum p + exp(sink - max s)) * sigmoid(gate)

Written for reading. Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaline_kernels.attention.blocks import BlockLists
from deltaline_kernels.attention.modifiers.packed import Modifiers
from deltaline_kernels.rows import Rows


def flex_decode_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    page_table: Tensor,
    rows: Rows,
    *,
    modifiers: Modifiers | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    return_lse: bool = False,
    blocks: BlockLists | None = None,
    value_dim: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what `flex_decode` does."""
    compute = torch.promote_types(q.dtype, torch.float32)
    num_tokens, num_heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    v_pages = k_pages[..., :value_dim] if v_pages is None else v_pages
    page_size, group = k_pages.shape[1], num_heads // k_pages.shape[2]
    o = torch.zeros(num_tokens, num_heads, v_pages.shape[3], dtype=compute, device=q.device)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=compute, device=q.device)
    starts = rows.query_start_loc.tolist()
    for i in range(rows.num_rows):
        begin, end, line = starts[i], starts[i + 1], int(rows.write_line[i])
        position = int(rows.position[i])
        num_keys = position + end - begin
        if line < 0 or begin == end:
            continue
        kv = torch.arange(num_keys, device=q.device)
        pages = page_table[line, kv // page_size].long()
        for head in range(num_heads):
            k = k_pages[pages, kv % page_size, head // group].to(compute)  # (keys, D)
            v = v_pages[pages, kv % page_size, head // group].to(compute)
            s = q[begin:end, head].to(compute) @ k.t() * scale  # (tokens, keys)
            if modifiers is not None or blocks is not None:
                q_idx = torch.arange(position, num_keys, device=q.device)[:, None]
                b, h = (torch.tensor(x, device=q.device) for x in (line, head))
                kinds = None
                if blocks is not None:
                    tokens = torch.arange(end - begin)
                    kinds = blocks.expand(line, tokens, kv.cpu())[head if blocks.num_heads > 1 else 0].to(q.device)
                s = (modifiers or Modifiers(device=q.device)).modify(s, b, h, q_idx, kv, kinds)
            total = s.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks[head].to(compute))
            # What sees no key has a sum of 0, and an output of 0.
            p = torch.where(s == -torch.inf, 0.0, (s - total[:, None]).exp())
            o[begin:end, head] = p @ v
            lse[begin:end, head] = total
    if gate is not None:
        o *= gate.to(compute).sigmoid()
    o = o.to(q.dtype)
    return (o, lse) if return_lse else o
