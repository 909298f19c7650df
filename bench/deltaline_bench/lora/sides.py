"""Our sides of a case of LoRA, and the field's, called as its own engine calls them. Knows no figures and no bars."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import Side, SideMaker
from deltaline_bench.lora.batch import SCALE, Batch
from deltaline_bench.peers import Function, Peers
from deltaline_kernels import LoraWeights, add_lora, group_tokens
from deltaline_kernels.compat import lora_expand, lora_shrink

VLLM = "vllm.lora.ops.triton_ops"


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: a projection's adapters, the same with the tiles of the step, and the field's signatures."""
    return {
        "deltaline": lambda: native(batch, group=False),
        "deltaline, tiles too": lambda: native(batch, group=True),
        "deltaline compat": lambda: vllm_side(batch, lora_shrink, lora_expand),
    }


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    return {
        "vLLM": lambda: vllm_side(
            batch,
            found.load(f"{VLLM}.lora_shrink_op", "_lora_shrink"),
            found.load(f"{VLLM}.lora_expand_op", "_lora_expand"),
        )
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


def vllm_side(batch: Batch, shrink: Function, expand: Function) -> Side:
    """Make a side of functions with vLLM's signatures: scales folded into B, lower ranks padded with zeros."""
    shape = batch.shape
    a = [w.contiguous() for w in batch.a.nan_to_num(0.0).unbind(1)]
    b = [w.transpose(1, 2).contiguous() for w in (SCALE * batch.b.nan_to_num(0.0)).split(shape.sizes, dim=2)]
    sums = torch.zeros(len(shape.sizes), shape.num_tokens, shape.max_rank, device=batch.device)
    out = batch.new_out()
    where = sorted_tokens(batch)

    def call() -> Any:
        shrink(batch.x, a, sums, *where, 1.0)
        expand(sums, b, out, *where, 0, True)
        return out

    return Side(call, lambda done: {"out": done}, lambda: out.copy_(batch.first_out))


def sorted_tokens(batch: Batch) -> tuple[Tensor, ...]:
    """Return the seven tensors that the engine prepares once per step, outside the layers."""
    slots, max_loras = batch.token_slots, batch.shape.num_slots
    ids, counts = torch.unique(slots, sorted=True, return_counts=True)
    lora_ids = torch.full((max_loras + 1,), -1, dtype=torch.int32, device=batch.device)
    num_tokens = torch.zeros(max_loras + 1, dtype=torch.int32, device=batch.device)
    starts = torch.zeros(max_loras + 2, dtype=torch.int32, device=batch.device)
    lora_ids[: ids.shape[0]] = ids.to(torch.int32)
    num_tokens[: ids.shape[0]] = counts.to(torch.int32)
    starts[1 : ids.shape[0] + 1] = counts.cumsum(0).to(torch.int32)
    order = torch.argsort(slots, stable=True).to(torch.int32)
    is_base = torch.tensor([not batch.shape.ranks])
    active = torch.tensor([ids.shape[0]], dtype=torch.int32)
    return slots, order, num_tokens, starts, lora_ids, is_base, active
