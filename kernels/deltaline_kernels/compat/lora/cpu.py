"""vLLM's shrink and expand on the CPU, adapter by adapter in fp32."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deltaline_kernels.compat.lora.tokens import AdapterTokens


def shrink_cpu(x: Tensor, weights: Sequence[Tensor], out: Tensor, tokens: AdapterTokens, scaling: float) -> None:
    """Write scaling * x A^T to out `[S, T, R]` fp32 for tokens that have an adapter."""
    for slot, own in _groups(tokens, weights[0].shape[0]):
        rows = x[own].float()
        for i, weight in enumerate(weights):
            out[i, own] = scaling * (rows @ weight[slot].float().t())


def expand_cpu(
    sums: Tensor, weights: Sequence[Tensor], out: Tensor, tokens: AdapterTokens, first: int, *, add: bool
) -> None:
    """Write s B^T to the columns of out `[T, columns]` from `first` on, or add it, for tokens that have an adapter."""
    for slot, own in _groups(tokens, weights[0].shape[0]):
        begin = first
        for i, weight in enumerate(weights):
            columns = slice(begin, begin + weight.shape[1])
            begin += weight.shape[1]
            y = sums[i, own].float() @ weight[slot].float().t()
            out[own, columns] = (y + out[own, columns].float() if add else y).to(out.dtype)


def _groups(tokens: AdapterTokens, num_slots: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each adapter's slot and its tokens."""
    counts, starts = tokens.counts.tolist(), tokens.starts.tolist()
    for i, slot in enumerate(tokens.ids.tolist()[: tokens.num_ids]):
        own = tokens.order[starts[i] : starts[i] + counts[i]].to(torch.int64)
        if 0 <= slot < num_slots and own.numel() > 0:
            yield slot, own
