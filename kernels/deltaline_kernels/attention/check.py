"""What the self-test runs of attention: rows of every kind, with the modifiers that models have. Knows no limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deltaline_kernels.attention import Modifiers, and_masks, find_modifier, flex_decode, flex_decode_reference
from deltaline_kernels.attention.heads import Heads
from deltaline_kernels.rows import Rows

PAGE = 16
# Keys before a row's tokens, on a GPU and on a CPU: of several splits, where there are few rows and where many.
POSITIONS, POSITIONS_CPU = (1100, 30, 700, 0), (70, 30, 17, 0)
MANY_ROWS = 64


def compare_attention(
    fill: Callable[..., Tensor], heads: Heads, max_draft: int, dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """Yield a batch's name, what `flex_decode` gave and what its reference gave; keys are moderate in length."""
    on_cpu = torch.device(device).type == "cpu"
    positions = POSITIONS_CPU if on_cpu else POSITIONS
    few = len(positions)
    batches = {
        "decode": [1] * few,
        "verify": [max_draft] * few,
        "prefill": [40] * few if on_cpu else [300, 3, 140, 200],
    }
    if not on_cpu:
        batches["many decodes"] = [1] * MANY_ROWS
    causal = find_modifier("causal")()
    capped = [find_modifier("soft_cap")(20.0)]
    for name, lengths in batches.items():
        starts = [positions[i % few] for i in range(len(lengths))]
        lines = list(range(1, len(lengths) + 1))
        zeros = [0] * len(lengths)
        fields = (lengths, lines, lines, lengths, zeros, zeros)
        rows = Rows.build(*fields, max_short=max_draft, device=device, position=starts)
        columns = max(-(-(start + n) // PAGE) for start, n in zip(starts, lengths, strict=True))
        num_pages = columns * (len(lengths) + 1)
        # Neighbouring pages of a line are apart.
        table = torch.arange(num_pages, dtype=torch.int32, device=device).view(columns, -1).t().contiguous()
        shape = (num_pages, PAGE, heads.num_keys)
        k, v = (fill(*shape, size).to(dtype) for size in (heads.key_dim, heads.value_dim))
        q = (fill(sum(lengths), heads.num_queries, heads.key_dim) * 0.5).to(dtype)
        gate = fill(sum(lengths), heads.num_queries, heads.value_dim).to(dtype)
        for mask in (causal, and_masks(causal, find_modifier("sliding_window")(50))):
            modifiers = Modifiers([] if mask is causal else capped, mask, device=device)
            arguments = (q, k, v, table, rows)
            got = flex_decode(*arguments, modifiers=modifiers, scale=heads.scale, gate=gate)
            want = flex_decode_reference(*arguments, modifiers=modifiers, scale=heads.scale, gate=gate)
            assert isinstance(got, Tensor) and isinstance(want, Tensor)
            yield f"attention, {name}, {'causal' if mask is causal else 'a window'}", [got], [want]
