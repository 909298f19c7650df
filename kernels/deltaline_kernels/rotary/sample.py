"""A small batch of every kind of row, computed by `rotate_and_store` and by its reference. Judges nothing."""

from collections.abc import Callable

import torch
from torch import Tensor

from deltaline_kernels.rotary import rotate_and_store, rotate_and_store_reference
from deltaline_kernels.rows import Rows


def compare_rotary(
    fill: Callable[..., Tensor], device: torch.device | str, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Return queries and pages as computed and as the reference has them, for heads as Qwen3-Next has them.

    Args:
        fill: makes an fp32 tensor of the sizes that it is called with, on `device`.
    """
    heads, kv_heads, dim, channels, page_size = 16, 2, 256, 64, 16
    lengths, lines, positions = [1, 4, 40, 3], [3, 1, 2, -1], [70, 14, 0, 0]
    zeros = [0] * len(lengths)
    rows = Rows.build(lengths, lines, lines, lengths, zeros, zeros, max_short=4, device=device, position=positions)
    # A projection's output: a gate beside each head of the queries, keys, values.
    wide = fill(sum(lengths), (2 * heads + 2 * kv_heads) * dim).to(dtype)
    gated, k, v = wide.split((2 * heads * dim, kv_heads * dim, kv_heads * dim), dim=1)
    q, k, v = gated.unflatten(1, (heads, -1))[..., :dim], *(x.unflatten(1, (kv_heads, dim)) for x in (k, v))
    page_table = torch.tensor([[0] * 5, [7, 2, 0, 0, 0], [3, 9, 4, 0, 0], [5, 1, 8, 10, 6]], dtype=torch.int32)
    angles = fill(80, channels // 2)
    rotary = torch.cat((angles.cos(), angles.sin()), dim=1)
    pages = fill(2, 11, page_size, kv_heads, dim).to(dtype)
    want_pages = pages.clone()
    inputs = (q, k, v, fill(dim), fill(dim), 1e-6, rotary)
    own = page_table.to(device)
    got = rotate_and_store(*inputs, pages[0], pages[1], own, rows)
    want = rotate_and_store_reference(*inputs, want_pages[0], want_pages[1], own, rows)
    return [got, pages], [want, want_pages]
