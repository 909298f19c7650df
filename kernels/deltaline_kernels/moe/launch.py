"""Order of the experts' kernels on a GPU: choice by choice, in tiles, or by torch's grouped products."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from deltaline_kernels.moe import plan
from deltaline_kernels.moe.direct import run_direct
from deltaline_kernels.moe.grouped import has_grouped, run_grouped
from deltaline_kernels.moe.product import run_tiles

HOPPER = (9, 0)


def run_experts_triton(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor, out: Tensor, *, gated: bool
) -> None:
    """Write out `[T, H]`; gated: with silu, else with relu2. Arguments are validated by `run_experts`."""
    run = _choose(min(len(x), plan.MAX_TOKENS), experts.shape[1], x, down)
    for begin in range(0, len(x), plan.MAX_TOKENS):
        some = slice(begin, begin + plan.MAX_TOKENS)
        run(x[some], gate_up, down, weights[some], experts[some], out[some], gated=gated)


def _choose(num_tokens: int, choices: int, x: Tensor, down: Tensor) -> Callable[..., None]:
    """Return what writes the outputs of `num_tokens` tokens, or of what is left of a batch."""
    num_experts = len(down)
    if num_tokens <= plan.DIRECT_TOKENS:
        # From Hopper on a launch may start while the one before it still runs.
        overlap = x.device.type != "cpu" and torch.cuda.get_device_capability(x.device) >= HOPPER
        return partial(run_direct, overlap=overlap)
    if plan.is_grouped(num_tokens, choices, num_experts) and has_grouped(x, down):
        return run_grouped
    return partial(run_tiles, plan=plan.plan_tiles(num_tokens, choices, num_experts, x.dtype))
