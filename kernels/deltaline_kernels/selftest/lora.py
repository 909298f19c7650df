"""What the self-test computes for adapters: several of them in one batch, of mixed ranks."""

import math

import torch
from torch import Tensor

from deltaline_kernels.lora import (
    LoraWeights,
    add_lora,
    add_lora_reference,
    group_tokens,
    spread_slots,
    spread_slots_reference,
)
from deltaline_kernels.selftest.shapes import Fill, Shapes


def compare_lora(
    fill: Fill, num_tokens: int, shapes: Shapes, device: torch.device | str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what adapters of several ranks added to a projection of two slices, and what their reference added."""
    heads, dtype = shapes.heads, shapes.dtype
    sizes, inputs, rank = (heads.value_channels, heads.num_value_heads), heads.key_channels or heads.value_channels, 64
    ranks = torch.tensor([[16, 0], [1, 64], [64, 5]], dtype=torch.int32, device=device)
    a, b = fill(3, 2, rank, inputs).to(dtype), fill(3, rank, sum(sizes)).to(dtype)
    # Of ones, inputs x rank are summed: fp16 holds that with this factor up to inputs of 65,504.
    weights = LoraWeights(a, b, ranks, torch.full((3, 2), 1 / rank, device=device), sizes)
    # Rows of 1, 3, 5 .. tokens; most have the last adapter, some have none.
    order = torch.arange(math.isqrt(num_tokens - 1) + 2, device=device)
    starts = (order**2).clamp(max=num_tokens).to(torch.int32)
    row_slots = torch.tensor([2, 1, 0, 2, -1, 2, 2, 2], dtype=torch.int32, device=device)[order[:-1] % 8]
    x, out = fill(num_tokens, inputs).to(dtype), fill(num_tokens, sum(sizes)).to(dtype)
    want = out.clone()
    add_lora(x, out, weights, group_tokens(spread_slots(row_slots, starts, num_tokens), 3, rank))
    add_lora_reference(x, want, weights, spread_slots_reference(row_slots, starts, num_tokens))
    return [out], [want]
