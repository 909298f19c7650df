"""Norm and rotary embedding, and keys and values kept in pages, on the CPU: vectorised PyTorch.

Over blocks of tokens that fit in cache, whatever rows they are of.
"""

import torch
from torch import Tensor

from deltaline_kernels.rows import Rows

# Values of the queries per block: 64 tokens x 16 heads x 256 channels (1 MiB of fp32).
BLOCK_VALUES = 256 * 1024


def rotate_and_store_cpu(
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
    out: Tensor,
) -> None:
    """Write the queries to out `[T, HQ, D]`; mutates `k_pages` and `v_pages`."""
    all_tokens, all_lines, all_positions = _live_tokens(rows)
    if all_tokens.shape[0] < out.shape[0]:
        out.zero_()
    block = max(1, BLOCK_VALUES // max(1, q.shape[1] * q.shape[2]))
    parts = zip(all_tokens.split(block), all_lines.split(block), all_positions.split(block), strict=True)
    for tokens, lines, positions in parts:
        cos, sin = rotary[positions].unsqueeze(1).chunk(2, dim=-1)  # (B, 1, R/2) each
        out[tokens] = _rotate(_normalise(q[tokens], q_norm, eps), cos, sin).to(out.dtype)
        pages = page_table[lines, positions // k_pages.shape[1]].long()
        slots = positions % k_pages.shape[1]
        k_pages[pages, slots] = _rotate(_normalise(k[tokens], k_norm, eps), cos, sin).to(k_pages.dtype)
        v_pages[pages, slots] = v[tokens]


def _live_tokens(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed tokens of rows that have a line, their lines and their positions, `[*]` int64 each."""
    starts = rows.query_start_loc.long()
    lengths = starts.diff()
    row = torch.repeat_interleave(torch.arange(rows.num_rows), lengths)
    tokens = starts[0] + torch.arange(row.shape[0])
    lines, positions = rows.write_line[row].long(), rows.position[row] + tokens - starts[row]
    live = lines > 0
    return tokens[live], lines[live], positions[live]


def _normalise(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return `heads` `[B, H, D]` in fp32, each divided by its root mean square and scaled."""
    x = heads.float()
    if weight is None:
        return x
    return x * x.square().mean(-1, keepdim=True).add_(eps).rsqrt_() * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x `[B, H, D]`, its first channels turned by angles of which cos and sin are `[B, 1, R/2]`."""
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]), dim=-1)
