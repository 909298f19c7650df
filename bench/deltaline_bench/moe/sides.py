"""Our sides of a case of experts, and the field's, called as its engine calls them. Knows no figures and no bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.moe.batch import Batch
from deltaline_bench.peers import Function, Peers
from deltaline_kernels import Router, route_and_run_experts, route_tokens, run_experts
from deltaline_kernels.compat import fused_experts

VLLM = "vllm.model_executor.layers.fused_moe.fused_moe"


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: the experts of a layer with its router behind the logits, without it, and the field's signature."""
    return {
        "deltaline": lambda: native(batch, route=True),
        "deltaline, experts alone": lambda: native(batch, route=False),
        "deltaline compat": lambda: field_side(batch, fused_experts),
    }


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's experts, the shared ones among them, for what the batch does."""
    return {
        "vLLM": lambda: field_side(batch, found.load(VLLM, "fused_experts")),
        "torch grouped_mm": lambda: torch_side(batch),
    }


def make_side(call: Callable[[], Tensor]) -> Side:
    """Make a side of a call that mutates nothing."""
    return Side(call, lambda done: {"out": done}, lambda: None)


def native(batch: Batch, *, route: bool) -> Side:
    """Make our side; `route`: with the choice of experts."""
    shape = batch.shape
    router = Router(
        shape.top_k,
        "sigmoid" if shape.is_sigmoid else "softmax",
        num_groups=shape.groups[0],
        top_groups=shape.groups[1],
        scale=shape.scale,
        num_shared=shape.num_shared,
        shared_gate=shape.is_gated,
    )
    given = route_tokens(batch.logits, router, batch.bias)

    def call() -> Tensor:
        if route:
            return route_and_run_experts(batch.x, batch.logits, router, batch.gate_up, batch.down, batch.bias)
        return run_experts(batch.x, batch.gate_up, batch.down, *given)

    return make_side(call)


def field_side(batch: Batch, function: Function) -> Side:
    """Make a side of a function with vLLM's signature, which is given the experts."""
    weights, experts = batch.routes[0], batch.routes[1].to(torch.int32)
    return make_side(lambda: function(batch.x, batch.gate_up, batch.down, weights, experts))


def torch_side(batch: Batch) -> Side:
    """Make a side of torch's own functions: pairs sorted by expert, grouped products, a sum over the sorted back."""
    if batch.shape.dtype != torch.bfloat16 or batch.device.type == "cpu":
        raise NotApplicable("bf16 on a GPU alone")
    grouped_mm: Any = functional.grouped_mm
    weights, experts = batch.routes
    choices, numbers = experts.shape[1], torch.arange(len(batch.gate_up), device=batch.device)

    def call() -> Tensor:
        sorted_experts, order = experts.flatten().sort()
        ends = torch.searchsorted(sorted_experts, numbers, right=True).to(torch.int32)
        both = grouped_mm(batch.x[order // choices], batch.gate_up.mT, offs=ends)
        gate, up = both.chunk(2, dim=1)
        parts = grouped_mm(functional.silu(gate) * up, batch.down.mT, offs=ends)
        parts = torch.empty_like(parts).index_copy_(0, order, parts)
        return torch.bmm(weights[:, None].to(parts.dtype), parts.view(*experts.shape, -1))[:, 0]

    return make_side(call)
