"""vLLM's shrink and expand in plain loops, and the metadata that it prepares: the truth of the functions of compat.

Written from the engine's semantics, token by token. Shares nothing with what it tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def metadata(token_slots: Sequence[int], max_loras: int, device: str = "cpu", *, spare: int = 0) -> dict[str, Any]:
    """Return the seven tensors for the slots of tokens; `spare` tokens at the end are those of a larger graph.

    As the engine leaves them: the mapping of spare tokens is what an earlier step put there.
    """
    num_tokens = len(token_slots)
    order = sorted(range(num_tokens), key=lambda t: token_slots[t])
    ids = sorted(set(token_slots))
    counts = [token_slots.count(slot) for slot in ids]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]

    def ints(values: Sequence[int], size: int, fill: int) -> Tensor:
        return torch.tensor([*values, *[fill] * (size - len(values))], dtype=torch.int32, device=device)

    return {
        "token_lora_mapping": ints(token_slots, num_tokens + spare, 0),
        "token_indices_sorted_by_lora_ids": ints(order, num_tokens + spare, 0),
        "num_tokens_per_lora": ints(counts, max_loras + 1, 0),
        "lora_token_start_loc": ints(starts, max_loras + 2, 0),
        "lora_ids": ints(ids, max_loras + 1, -1),
        "no_lora_flag_cpu": torch.tensor([all(slot == -1 for slot in token_slots)]),
        "num_active_loras": torch.tensor([max_loras + 1], dtype=torch.int32),
    }


def field_shrink(inputs: Tensor, weights: Sequence[Tensor], token_slots: Sequence[int], scaling: float) -> Tensor:
    """Return `[S, T, R]` fp32: scaling * x A^T, zero for tokens without an adapter."""
    rank = weights[0].shape[-2]
    out = torch.zeros(len(weights), inputs.shape[0], rank)
    for i, weight in enumerate(weights):
        for t, slot in enumerate(token_slots):
            if slot >= 0:
                a = weight.reshape(weight.shape[0], *weight.shape[-2:])[slot].cpu().float()
                out[i, t] = scaling * (a @ inputs[t].cpu().float())
    return out


def field_expand(
    inputs: Tensor,
    weights: Sequence[Tensor],
    before: Tensor,
    token_slots: Sequence[int],
    offset_start: int,
    add_inputs: bool,
) -> Tensor:
    """Return the outputs in fp32, one rounding away from what is stored."""
    out = before.cpu().float()
    column = offset_start
    for i, weight in enumerate(weights):
        size = weight.shape[-2]
        for t, slot in enumerate(token_slots):
            if slot >= 0:
                b = weight.reshape(weight.shape[0], *weight.shape[-2:])[slot].cpu().float()
                y = b @ inputs[i, t].cpu().float()
                own = slice(column, column + size)
                out[t, own] = out[t, own] + y if add_inputs else y
        column += size
    return out
