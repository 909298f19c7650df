"""Norms and rotates queries and keys, and stores keys and values in pages (a stand-in that knows the CPU alone)."""

import torch
from torch import Tensor

from deltaline_kernels.rows import Rows


def rotate_and_store(
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
    """Return q `[T, HQ, D]`, normed and rotated; mutates the pages of the rows' lines at the rows' positions."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    page_size = k_pages.shape[1]
    starts = rows.query_start_loc.tolist()
    for row, (read, line) in enumerate(zip(rows.read_line.tolist(), rows.write_line.tolist(), strict=True)):
        begin, end = starts[row], starts[row + 1]
        if read < 0 or line < 0 or begin == end:
            continue
        first = int(rows.position[row])
        at = torch.arange(first, first + end - begin, device=q.device)
        out[begin:end] = _rotate(_norm(q[begin:end], q_norm, eps), rotary[at])
        pages = page_table[line, at // page_size].long()
        k_pages[pages, at % page_size] = _rotate(_norm(k[begin:end], k_norm, eps), rotary[at])
        v_pages[pages, at % page_size] = v[begin:end]
    return out


rotate_and_store_reference = rotate_and_store


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    half = rotary.shape[-1] // 2
    cos, sin = (part[:, None] for part in rotary.split(half, dim=-1))
    a, b, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)
