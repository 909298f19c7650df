"""Order of the experts' kernels on a GPU: choice by choice, in tiles, or by torch's grouped products."""

import torch
from torch import Tensor

from deltaline_kernels.moe import plan
from deltaline_kernels.moe.direct import run_direct
from deltaline_kernels.moe.grouped import HOPPER, has_grouped, run_grouped
from deltaline_kernels.moe.product import run_tiles


def run_experts_triton(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor, out: Tensor) -> None:
    """Write out `[T, H]`; arguments are validated by `run_experts`."""
    num_tokens, choices = experts.shape
    num_experts, width, inner = down.shape
    if num_tokens <= plan.DIRECT_TOKENS:
        # From Hopper on a launch may start while the one before it still runs.
        overlap = x.device.type != "cpu" and torch.cuda.get_device_capability(x.device) >= HOPPER
        run_direct(x, gate_up, down, weights, experts, out, overlap=overlap)
    elif plan.is_grouped(num_tokens, choices, num_experts) and has_grouped(x, width, inner):
        run_grouped(x, gate_up, down, weights, experts, out)
    else:
        tiles = plan.plan_tiles(num_tokens, choices, num_experts, x.dtype)
        run_tiles(x, gate_up, down, weights, experts, out, tiles)
