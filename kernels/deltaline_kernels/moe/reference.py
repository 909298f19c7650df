"""Routing and experts token by token: the truth that the other paths are tested against.

Written for reading. Computes in fp32 (fp64 when given fp64), on any device, without speed.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from deltaline_kernels.moe.router import Router
from deltaline_kernels.moe.weight import ExpertWeights

# Below this no choice falls, and NaN counts as it; two of them are still finite in fp32.
LEAST_CHOICE = -1e38


def route_tokens_reference(
    logits: Tensor, router: Router, bias: Tensor | None = None, query_start_loc: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights `[T, C]` and experts `[T, C]` as `route_tokens` does."""
    compute = torch.promote_types(logits.dtype, torch.float32)
    num_tokens, num_experts = logits.shape[0], logits.shape[1] - router.shared_gate
    num_live = num_tokens if query_start_loc is None else int(query_start_loc[-1])
    weights = torch.zeros(num_tokens, router.num_choices, dtype=compute, device=logits.device)
    experts = torch.full((num_tokens, router.num_choices), -1, dtype=torch.int32, device=logits.device)
    for t in range(num_live):
        row = logits[t, :num_experts].to(compute)
        scores = row.softmax(0) if router.scoring == "softmax" else row.sigmoid()
        choices = scores if bias is None else scores + bias.to(compute)
        choices = choices.nan_to_num(LEAST_CHOICE).clamp(min=LEAST_CHOICE)
        groups = choices.view(router.num_groups, -1)  # (groups, experts of one)
        best = groups.amax(1) if bias is None else groups.topk(min(2, groups.shape[1]), dim=1).values.sum(1)
        kept = best.sort(descending=True, stable=True).indices[: router.top_groups]
        dropped = torch.ones(router.num_groups, dtype=torch.bool, device=logits.device)
        dropped[kept] = False
        choices = groups.masked_fill(dropped[:, None], -torch.inf).flatten()
        chosen = choices.sort(descending=True, stable=True).indices[: router.top_k]
        own = scores[chosen]
        if router.normalize:
            own = own / (own.sum() + 1e-20)
        weights[t, : router.top_k] = own * router.scale
        experts[t, : router.top_k] = chosen.to(torch.int32)
        if router.num_shared > 0:
            gate = logits[t, num_experts].to(compute).sigmoid() if router.shared_gate else 1.0
            weights[t, router.top_k :] = gate
            shared = torch.arange(num_experts, num_experts + router.num_shared, device=logits.device)
            experts[t, router.top_k :] = shared.to(torch.int32)
    return weights, experts


def run_experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    activation: str = "silu",
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Return the outputs `[T, H]` as `run_experts` does."""
    compute = torch.promote_types(x.dtype, torch.float32)
    first = ExpertWeights(gate_up, gate_up_scales, 2 if activation == "silu" else 1)
    second = ExpertWeights(down, down_scales)
    out = torch.zeros(x.shape, dtype=compute, device=x.device)
    for t, (own_weights, own_experts) in enumerate(zip(weights, experts.tolist(), strict=True)):
        for weight, expert in zip(own_weights, own_experts, strict=True):
            if 0 <= expert < gate_up.shape[0]:
                both = first.of(expert, compute) @ x[t].to(compute)  # (2 I), or (I) without gates
                hidden = _activated(both, activation, limit)
                out[t] += weight.to(compute) * (second.of(expert, compute) @ hidden)
    return out.to(x.dtype)


def _activated(both: Tensor, activation: str, limit: float) -> Tensor:
    """Return what an expert does with its inner channels, G x | U x or U x alone."""
    if activation != "silu":
        return both.relu() ** 2
    gate, up = both.chunk(2)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return silu(gate) * up


def route_and_run_experts_reference(
    x: Tensor,
    logits: Tensor,
    router: Router,
    gate_up: Tensor,
    down: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    activation: str = "silu",
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Return the outputs `[T, H]` as `route_and_run_experts` does."""
    weights, experts = route_tokens_reference(logits, router, bias, query_start_loc)
    return run_experts_reference(x, gate_up, down, weights, experts, activation, gate_up_scales, down_scales, limit)
