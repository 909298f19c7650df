"""Order of the experts' kernels on a GPU: choice by choice, in tiles, or sorted."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from deltaline_kernels.moe import plan
from deltaline_kernels.moe.direct import run_direct
from deltaline_kernels.moe.many import run_sorted
from deltaline_kernels.moe.product import run_tiles
from deltaline_kernels.moe.route import route_triton
from deltaline_kernels.moe.router import Router
from deltaline_kernels.moe.weight import ExpertWeights


def run_experts_triton(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    *,
    gated: bool,
    limit: float,
) -> None:
    """Write out `[T, H]`; gated: with silu, else with relu2. Arguments are validated by `run_experts`."""
    run = _choose(min(len(x), plan.MAX_TOKENS), experts.shape[1], x, down)
    for begin in range(0, len(x), plan.MAX_TOKENS):
        some = slice(begin, begin + plan.MAX_TOKENS)
        run(x[some], gate_up, down, weights[some], experts[some], out[some], gated=gated, limit=limit)


def _choose(num_tokens: int, choices: int, x: Tensor, down: ExpertWeights) -> Callable[..., None]:
    """Return what writes the outputs of `num_tokens` tokens, or of what is left of a batch."""
    num_experts = len(down.values)
    if num_tokens <= plan.DIRECT_TOKENS:
        return run_direct
    if plan.is_sorted(num_tokens, choices, x, down.values):
        return run_sorted
    return partial(run_tiles, plan=plan.plan_tiles(num_tokens, choices, num_experts, x.dtype))


def route_and_run_triton(
    x: Tensor,
    logits: Tensor,
    router: Router,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    bias: Tensor | None,
    query_start_loc: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    out: Tensor,
    *,
    gated: bool,
    limit: float,
) -> None:
    """Write weights and experts `[T, C]` and out `[T, H]`; arguments are validated by `route_and_run_experts`."""
    route_triton(logits, router, bias, query_start_loc, weights, experts)
    if len(x) <= plan.DIRECT_TOKENS:
        run_direct(x, gate_up, down, weights, experts, out, gated=gated, limit=limit, num_shared=router.num_shared)
    else:
        run_experts_triton(x, gate_up, down, weights, experts, out, gated=gated, limit=limit)
