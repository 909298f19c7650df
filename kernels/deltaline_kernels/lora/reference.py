"""LoRA adapter by adapter: the truth that the other paths are tested against.

Written for reading. Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
from torch import Tensor

from deltaline_kernels.lora.weights import LoraWeights


def spread_slots_reference(row_slots: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Return the slot of each token `[T]` as `spread_slots` does."""
    starts = query_start_loc.tolist()
    token_slots = row_slots.new_full((num_tokens,), -1)
    for row, slot in enumerate(row_slots.tolist()):
        token_slots[starts[row] : starts[row + 1]] = slot
    return token_slots


def add_lora_reference(x: Tensor, out: Tensor, weights: LoraWeights, token_slots: Tensor) -> None:
    """Add to out `[T, out]` as `add_lora` does, for the slots `[T]` of the tokens; mutates `out`."""
    compute = torch.promote_types(x.dtype, torch.float32)
    for slot in token_slots.unique().tolist():
        if not 0 <= slot < weights.num_slots:
            continue
        own = (token_slots == slot).nonzero()[:, 0]
        begin = 0
        for i, size in enumerate(weights.sizes):
            columns = slice(begin, begin + size)
            begin += size
            rank = min(int(weights.ranks[slot, i]), weights.max_rank)
            if rank < 1:
                continue
            s = x[own].to(compute) @ weights.a[slot, i, :rank].to(compute).T  # (n, rank)
            product = s @ weights.b[slot, :rank, columns].to(compute)  # (n, size)
            y = out[own, columns].to(compute) + weights.scales[slot, i].to(compute) * product
            if weights.factors is not None:
                y = y * weights.factors[slot, columns].to(compute)
            out[own, columns] = y.to(out.dtype)
