"""Our sides of a case of LoRA. Knows no figures and no bars."""

from __future__ import annotations

from typing import Any

import torch

from deltaline_bench.case import Side, SideMaker
from deltaline_bench.lora.batch import SCALE, Batch
from deltaline_bench.lora.field import vllm_side
from deltaline_kernels import LoraWeights, add_lora, group_tokens
from deltaline_kernels.compat import lora_expand, lora_shrink


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: a projection's adapters, the same with the tiles of the step, and the field's signatures."""
    return {
        "deltaline": lambda: native(batch, group=False),
        "deltaline, tiles too": lambda: native(batch, group=True),
        "deltaline compat": lambda: vllm_side(batch, lora_shrink, lora_expand),
    }


def native(batch: Batch, *, group: bool) -> Side:
    """Make our side; `group`: the tokens are grouped in each call, not once per step of many projections."""
    shape = batch.shape
    size = (shape.num_slots, len(shape.sizes))
    ranks = torch.zeros(size, dtype=torch.int32, device=batch.device)
    for slot, rank in enumerate(shape.ranks):
        ranks[slot] = rank
    weights = LoraWeights(batch.a, batch.b, ranks, torch.full(size, SCALE, device=batch.device), shape.sizes)
    tiles = group_tokens(batch.token_slots, shape.num_slots, shape.max_rank)
    out = batch.new_out()

    def call() -> Any:
        made = group_tokens(batch.token_slots, shape.num_slots, shape.max_rank) if group else tiles
        add_lora(batch.x, out, weights, made)
        return out

    return Side(call, lambda done: {"out": done}, lambda: out.copy_(batch.first_out))
