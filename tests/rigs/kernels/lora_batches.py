"""Random batches of many adapters. Whatever no token may read is NaN: ranks behind an adapter's own, unused slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import LoraWeights, add_lora_reference


@dataclass(frozen=True)
class Batch:
    x: Tensor
    out: Tensor
    weights: LoraWeights
    token_slots: Tensor

    def clone(self) -> Batch:
        """Return the batch with its own copy of what an operation mutates."""
        wide = self.out.new_full((self.out.shape[0], self.out.stride(0)), torch.nan)
        own = wide[:, : self.out.shape[1]]
        own.copy_(self.out)
        return replace(self, out=own)

    def run(self, path: Path) -> Tensor:
        """Return the outputs."""
        out = self.clone().out
        path.add_lora(self.x, out, self.weights, self.token_slots)
        return out

    def run_reference(self) -> Tensor:
        """Return the outputs of the reference."""
        out = self.clone().out
        add_lora_reference(self.x, out, self.weights, self.token_slots)
        return out

    def exact(self) -> Tensor:
        """Return the outputs in fp64, computed from whole matrices instead of token by token."""
        weights, y = self.weights, self.out.double()
        for slot in range(weights.num_slots):
            own = (self.token_slots == slot).nonzero()[:, 0]
            begin = 0
            for i, size in enumerate(weights.sizes):
                columns = slice(begin, begin + size)
                begin += size
                rank = int(weights.ranks[slot, i])
                if rank == 0 or own.numel() == 0:
                    continue
                delta = weights.a[slot, i, :rank].double().T @ weights.b[slot, :rank, columns].double()
                total = y[own][:, columns] + weights.scales[slot, i].double() * (self.x[own].double() @ delta)
                if weights.factors is not None:
                    total = total * weights.factors[slot, columns].double()
                y[own, columns] = total
        return y


def make_batch(
    path: Path,
    token_slots: Sequence[int],
    ranks: Sequence[Sequence[int]],
    sizes: tuple[int, ...] = (40,),
    inputs: int = 96,
    *,
    max_rank: int | None = None,
    factors: bool = False,
    out_dtype: torch.dtype | None = None,
    integers: bool = False,
    padding: int = 3,
    seed: int = 0,
) -> Batch:
    """Make inputs on the path's device; rows of x and out lie `padding` values apart, with NaN between.

    Args:
        token_slots: the slot of each token; slots that no token has hold NaN, and so does x where there is no adapter.
        ranks: of each slot, slice by slice.
        integers: small ones everywhere, of which every sum is exact.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        if integers:
            return torch.randint(-2, 3, size, generator=generator).float()
        return torch.randn(*size, generator=generator)

    num_slots, num_slices, num_tokens, outputs = len(ranks), len(sizes), len(token_slots), sum(sizes)
    rank = max_rank or max(max(own) for own in ranks)
    a = draw(num_slots, num_slices, rank, inputs) / (1 if integers else inputs**0.5)
    b = draw(num_slots, rank, outputs) / (1 if integers else max(1, rank) ** 0.5)
    for slot, own in enumerate(ranks):
        begin = 0
        for i, size in enumerate(sizes):
            count = own[i] if slot in token_slots else 0
            a[slot, i, count:] = torch.nan
            b[slot, count:, begin : begin + size] = torch.nan
            begin += size
    x = draw(num_tokens, inputs + padding)
    x[:, inputs:] = torch.nan
    out = draw(num_tokens, outputs + padding)
    slots = torch.tensor(token_slots, dtype=torch.int32)
    x[(slots < 0) | (slots >= num_slots)] = torch.nan
    scales = draw(num_slots, num_slices).abs() + 1 if integers else draw(num_slots, num_slices)
    to = path.device
    weights = LoraWeights(
        a.to(to, path.dtype),
        b.to(to, path.dtype),
        torch.tensor(ranks, dtype=torch.int32, device=to),
        scales.to(to),
        sizes,
        draw(num_slots, outputs).to(to) if factors else None,
    )
    x = x.to(to, path.dtype)[:, :inputs]
    return Batch(x, out.to(to, out_dtype or path.dtype)[:, :outputs], weights, slots.to(to))
