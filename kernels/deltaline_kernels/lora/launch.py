"""Order of the LoRA kernels on a GPU: both halves in one launch, or a shrink and an expand that starts beside it."""

import torch
from torch import Tensor

from deltaline_kernels.lora.expand import launch_expand
from deltaline_kernels.lora.fused import launch_fused
from deltaline_kernels.lora.plan import find_bucket, pad_rank, plan_expand, plan_fused, plan_shrink
from deltaline_kernels.lora.shrink import launch_shrink
from deltaline_kernels.lora.tiles import AdapterTiles
from deltaline_kernels.lora.weights import LoraWeights

# From here on a launch may start while the one before it still runs.
HOPPER = (9, 0)


def add_lora_triton(x: Tensor, out: Tensor, weights: LoraWeights, tiles: AdapterTiles) -> None:
    """Add to out `[T, out]`; arguments are validated by `add_lora`."""
    num_tokens, rank, inputs = x.shape[0], weights.max_rank, weights.num_inputs
    bucket = find_bucket(num_tokens, rank)
    fused = plan_fused(bucket, num_tokens, rank, inputs, x.dtype)
    if fused is not None:
        launch_fused(x, out, weights, tiles, fused)
        return
    shrink = plan_shrink(bucket, num_tokens, rank, inputs, x.dtype)
    size = (shrink.splits, tiles.num_tiles, tiles.rows, len(weights.sizes), pad_rank(rank))
    sums = torch.empty(size, dtype=torch.float32, device=x.device)
    overlap = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= HOPPER
    launch_shrink(x, weights.a, weights.ranks, sums, tiles, shrink, dependents=overlap)
    launch_expand(
        sums,
        weights.b,
        weights.ranks,
        weights.scales,
        weights.factors,
        weights.sizes,
        out,
        tiles,
        plan_expand(bucket, num_tokens, rank, x.dtype),
        dependent=overlap,
    )
