"""Norm and rotary embedding of queries and keys, and keys and values kept in pages, head by head: the truth.

Written for reading. Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
from torch import Tensor

from deltaline_kernels.rows import Rows


def rotate_and_store_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rotary: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    rows: Rows,
) -> Tensor:
    """Return q' `[T, HQ, D]` in q.dtype; mutates `k_pages` and `v_pages` as `rotate_and_store` does."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    page_size = k_pages.shape[1]
    starts, _, writes, _, _, _, positions, *_ = rows.control.tolist()
    for i in range(rows.num_rows):
        line = writes[i]
        if line < 1:
            continue
        for t in range(starts[i], starts[i + 1]):
            position = positions[i] + t - starts[i]
            out[t] = _rotate(_normalise(q[t], q_norm, eps), rotary[position]).to(q.dtype)
            page = int(page_table[line, position // page_size])
            slot = position % page_size
            k_pages[page, slot] = _rotate(_normalise(k[t], k_norm, eps), rotary[position]).to(k.dtype)
            v_pages[page, slot] = v[t]
    return out


def _normalise(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return `heads` `[H, D]` in fp32, each divided by its root mean square and scaled."""
    x = heads.to(torch.promote_types(heads.dtype, torch.float32))
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x `[H, D]`, its first R channels turned in pairs i, i + R/2 by `angles`, `[R]` of cosines | sines."""
    half = angles.shape[0] // 2
    cos, sin = angles[:half], angles[half:]
    low, high = x[:, :half], x[:, half : 2 * half]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[:, 2 * half :]), dim=1)
