"""Order of the LoRA kernels on a GPU: a shrink, and an expand that starts beside it.

They are other kernels for tiles of many tokens with high ranks.
"""

import torch
from torch import Tensor

from deltaline_kernels.device.overlap import HOPPER, can_overlap
from deltaline_kernels.lora.dense import empty_halves, launch_expand_dense, launch_shrink_dense
from deltaline_kernels.lora.expand import launch_expand
from deltaline_kernels.lora.plan import DensePlan, find_bucket, pad_rank, plan_dense, plan_expand, plan_shrink
from deltaline_kernels.lora.shrink import launch_shrink
from deltaline_kernels.lora.tiles import AdapterTiles
from deltaline_kernels.lora.weights import LoraWeights


def find_dense(num_tokens: int, rows: int, rank: int, inputs: int, x: Tensor) -> DensePlan | None:
    """Return how tiles of `rows` tokens are computed whole on the device of `x`, or None where they aren't."""
    # From Hopper on a program has memory for dense tiles.
    if x.device.type != "cpu" and torch.cuda.get_device_capability(x.device) < HOPPER:
        return None
    return plan_dense(num_tokens, rows, rank, inputs, x.dtype)


def add_lora_triton(x: Tensor, out: Tensor, weights: LoraWeights, tiles: AdapterTiles) -> None:
    """Add to out `[T, out]`; arguments are validated by `add_lora`."""
    num_tokens, rank, inputs = x.shape[0], weights.max_rank, weights.num_inputs
    overlap = can_overlap(x)
    dense = find_dense(num_tokens, tiles.rows, rank, inputs, x)
    if dense is not None:
        halves = empty_halves(tiles, len(weights.sizes), weights.b, dense)
        launch_shrink_dense(x, weights.a, weights.ranks, halves, tiles, dense, dependents=overlap)
        launch_expand_dense(halves, weights.of_outputs, out, tiles, dense, dependent=overlap)
        return
    bucket = find_bucket(num_tokens, rank)
    shrink = plan_shrink(bucket, num_tokens, rank, inputs, x.dtype)
    size = (shrink.splits, tiles.num_tiles, tiles.rows, len(weights.sizes), pad_rank(rank))
    sums = torch.empty(size, dtype=torch.float32, device=x.device)
    launch_shrink(x, weights.a, weights.ranks, sums, tiles, shrink, dependents=overlap)
    expand = plan_expand(bucket, num_tokens, rank, x.dtype)
    launch_expand(sums, weights.of_outputs, out, tiles, expand, dependent=overlap)
