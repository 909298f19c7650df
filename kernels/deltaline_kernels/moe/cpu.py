"""Routing and experts on the CPU: tiles of tokens of one expert, each a product of matrices of one shape in fp32."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from deltaline_kernels.cpu.group import group_cpu
from deltaline_kernels.device.sizes import count_tiles, pow2
from deltaline_kernels.moe.router import Router

# As in the reference.
LEAST_CHOICE = -1e38
MAX_ROWS = 16


def route_cpu(
    logits: Tensor,
    router: Router,
    bias: Tensor | None,
    query_start_loc: Tensor | None,
    weights: Tensor,
    experts: Tensor,
) -> None:
    """Write weights and experts `[T, C]`."""
    num_experts = logits.shape[1] - router.shared_gate
    rows = logits[:, :num_experts].float()
    scores = rows.softmax(1) if router.scoring == "softmax" else rows.sigmoid()
    choices = scores if bias is None else scores + bias
    choices = choices.nan_to_num(LEAST_CHOICE).clamp(min=LEAST_CHOICE)
    if router.top_groups < router.num_groups:
        groups = choices.unflatten(1, (router.num_groups, -1))
        best = groups.amax(2) if bias is None else groups.topk(2, dim=2).values.sum(2)
        kept = torch.zeros(best.shape, dtype=torch.bool).scatter_(1, _largest(best, router.top_groups), True)
        choices = groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    chosen = _largest(choices, router.top_k)
    own = scores.gather(1, chosen)
    if router.normalize:
        own = own / (own.sum(1, keepdim=True) + 1e-20)
    weights[:, : router.top_k] = own * router.scale
    experts[:, : router.top_k] = chosen.to(torch.int32)
    if router.num_shared > 0:
        weights[:, router.top_k :] = logits[:, num_experts:].float().sigmoid() if router.shared_gate else 1.0
        experts[:, router.top_k :] = torch.arange(num_experts, num_experts + router.num_shared, dtype=torch.int32)
    if query_start_loc is not None:
        num_live = int(query_start_loc[-1])
        weights[num_live:] = 0.0
        experts[num_live:] = -1


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the places of the largest values of each row, the lowest place first among equal ones."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def run_experts_cpu(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor, out: Tensor) -> None:
    """Write out `[T, H]`.

    A tile is computed whole even where it has few tokens: so a row's bits don't depend on which others are in it.
    """
    num_pairs, choices = experts.numel(), experts.shape[1]
    rows = min(MAX_ROWS, pow2(x.shape[0]))
    tile_experts = torch.empty(count_tiles(num_pairs, gate_up.shape[0], rows), dtype=torch.int32)
    tile_pairs = torch.empty(len(tile_experts), rows, dtype=torch.int32)
    group_cpu(experts.flatten(), gate_up.shape[0], tile_experts, tile_pairs)
    parts = torch.zeros(num_pairs, x.shape[1], dtype=torch.float32)
    last = -1
    for expert, pairs in zip(tile_experts.tolist(), tile_pairs, strict=True):
        if expert < 0:
            break
        if expert != last:
            first, second, last = gate_up[expert].float().t(), down[expert].float().t(), expert
        own = pairs[pairs >= 0].long()
        tile = torch.zeros(rows, x.shape[1], dtype=torch.float32)
        tile[: len(own)] = x[own // choices].float()
        gate, up = (tile @ first).chunk(2, dim=1)
        parts[own] = ((silu(gate) * up) @ second)[: len(own)]
    parts = parts.view(*experts.shape, -1)
    # Weights of choices without an expert may be anything.
    is_used = (experts >= 0) & (experts < gate_up.shape[0])
    total = torch.zeros(x.shape, dtype=torch.float32)
    for i in range(choices):
        total += torch.where(is_used[:, i], weights[:, i], 0.0)[:, None] * parts[:, i]
    out.copy_(total)
