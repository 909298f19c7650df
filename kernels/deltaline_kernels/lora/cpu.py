"""LoRA on the CPU: the same tiles, each a product of matrices of one shape in fp32."""

import torch
from torch import Tensor

from deltaline_kernels.lora.tiles import AdapterTiles
from deltaline_kernels.lora.weights import LoraWeights


def spread_slots_cpu(row_slots: Tensor, starts: Tensor, token_slots: Tensor) -> None:
    """Write `token_slots` `[T]`."""
    end = int(starts[-1])
    token_slots[:end] = row_slots.repeat_interleave(starts.diff())
    token_slots[end:] = -1


def add_lora_cpu(x: Tensor, out: Tensor, weights: LoraWeights, tiles: AdapterTiles) -> None:
    """Add to out `[T, out]`; mutates it.

    A tile is computed whole even where it has few tokens: so a row's bits don't depend on which others are in it.
    """
    last = -1
    for slot, tokens in zip(tiles.slots.tolist(), tiles.tokens, strict=True):
        if slot < 0:
            break
        if slot != last:
            slices, last = _read_slot(weights, slot), slot
        own = tokens[tokens >= 0].long()
        rows = torch.zeros(tokens.shape[0], x.shape[1], dtype=torch.float32)
        rows[: len(own)] = x[own]
        for columns, a, b, scale, factor in slices:
            y = (rows @ a.t() @ b)[: len(own)].mul_(scale).add_(out[own, columns])
            out[own, columns] = (y if factor is None else y.mul_(factor)).to(out.dtype)


def _read_slot(weights: LoraWeights, slot: int) -> list[tuple[slice, Tensor, Tensor, float, Tensor | None]]:
    """Return for each slice with a rank its columns, A `[rank, in]`, B `[rank, size]`, scale and factors, in fp32."""
    slices, begin = [], 0
    for i, size in enumerate(weights.sizes):
        columns = slice(begin, begin + size)
        begin += size
        rank = min(int(weights.ranks[slot, i]), weights.max_rank)
        if rank > 0:
            factor = None if weights.factors is None else weights.factors[slot, columns]
            a, b = weights.a[slot, i, :rank].float(), weights.b[slot, :rank, columns].float()
            slices.append((columns, a, b, float(weights.scales[slot, i]), factor))
    return slices
