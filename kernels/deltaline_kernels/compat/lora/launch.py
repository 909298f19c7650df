"""Sends vLLM's shrink and expand to the LoRA kernels, slice by slice."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deltaline_kernels.compat.lora.kernel import add_up, list_tiles, split_sums
from deltaline_kernels.compat.lora.tokens import AdapterTokens
from deltaline_kernels.device.sizes import count_tiles
from deltaline_kernels.lora.dense import empty_halves, launch_expand_dense, launch_shrink_dense
from deltaline_kernels.lora.expand import launch_expand
from deltaline_kernels.lora.launch import find_dense
from deltaline_kernels.lora.plan import (
    find_bucket,
    pad_rank,
    piece_rows,
    plan_expand,
    plan_shrink,
    tile_rows,
)
from deltaline_kernels.lora.shrink import launch_shrink
from deltaline_kernels.lora.tiles import AdapterTiles
from deltaline_kernels.lora.weights import OutputWeights


def shrink_triton(x: Tensor, weights: Sequence[Tensor], out: Tensor, tokens: AdapterTokens, scaling: float) -> None:
    """Write scaling * x A^T to out `[S, T, R]` for tokens that have an adapter."""
    num_slots, rank, num_inputs = weights[0].shape
    rows = tile_rows(tokens.num_tokens, rank)
    dense = find_dense(tokens.num_tokens, rows, rank, num_inputs, x)
    if dense is not None:
        tiles = _list_tiles(tokens, num_slots, rows)
        for weight, y in zip(weights, out, strict=True):
            launch_shrink_dense(x, weight[:, None], None, y, tiles, dense, scaling=scaling)
        return
    tiles = _list_tiles(tokens, num_slots, piece_rows(tokens.num_tokens))
    plan = plan_shrink(find_bucket(x.shape[0], rank), x.shape[0], rank, num_inputs, x.dtype)
    size = (plan.splits, tiles.num_tiles, tiles.rows, 1, pad_rank(rank))
    sums = torch.empty(size, dtype=torch.float32, device=x.device)
    for weight, y in zip(weights, out, strict=True):
        launch_shrink(x, weight[:, None], None, sums, tiles, plan, dependents=False)
        add_up(sums, y, tiles, scaling)


def expand_triton(
    sums: Tensor, weights: Sequence[Tensor], out: Tensor, tokens: AdapterTokens, first: int, *, add: bool
) -> None:
    """Write s B^T to the columns of out `[T, columns]` from `first` on, or add it, for tokens that have an adapter."""
    num_slots, _, rank = weights[0].shape
    rows = tile_rows(tokens.num_tokens, rank)
    dense = find_dense(tokens.num_tokens, rows, rank, 1, weights[0])
    tiles = _list_tiles(tokens, num_slots, piece_rows(tokens.num_tokens) if dense is None else rows)
    plan = plan_expand(find_bucket(tokens.num_tokens, rank), tokens.num_tokens, rank, weights[0].dtype)
    for s, weight in zip(sums, weights, strict=True):
        size = weight.shape[1]
        columns = out[:, first : first + size]
        b = OutputWeights(weight.transpose(1, 2), (size,))
        if dense is None:
            launch_expand(s[None, None, :, None], b, columns, tiles, plan, by_token=True, add=add)
        else:
            halves = empty_halves(tiles, 1, weight, dense)
            split_sums(s, halves, tiles)
            launch_expand_dense(halves, b, columns, tiles, dense, add=add)
        first += size


def _list_tiles(tokens: AdapterTokens, num_slots: int, rows: int) -> AdapterTiles:
    """Return the tiles of the engine's groups, of so many rows, built on the device."""
    num_tiles = count_tiles(tokens.num_tokens, max(1, tokens.num_ids), rows)
    device = tokens.order.device
    slots = torch.empty((num_tiles,), dtype=torch.int32, device=device)
    tiles = torch.empty((num_tiles, rows), dtype=torch.int32, device=device)
    made = AdapterTiles(slots, tiles, tokens.num_tokens, num_slots)
    list_tiles(tokens.order, tokens.counts, tokens.starts, tokens.ids, tokens.num_ids, num_slots, made)
    return made
