"""The tokens, adapters and fp32 truth of one case of LoRA. Knows no implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_bench import batch

# alpha / rank of every adapter: a power of two, so that a peer may fold it into its weights without rounding.
SCALE = 2.0
# Batches of more tokens are prefills: each adapter's tokens are neighbours.
DECODE_TOKENS = 256


@dataclass(frozen=True)
class Shape(batch.Shape):
    """`num_tokens` tokens over `ranks` adapters, none if there are no ranks; slices of `sizes` outputs each.

    Args:
        max_rank: of the slots; `ranks` are what the adapters use of it.
    """

    num_tokens: int
    inputs: int
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    max_rank: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def outputs(self) -> int:
        return sum(self.sizes)

    @property
    def num_slots(self) -> int:
        return max(1, len(self.ranks))

    def slot(self, token: int) -> int:
        """Return the adapter of a token, -1 for none."""
        if not self.ranks:
            return -1
        if self.num_tokens <= DECODE_TOKENS:
            return token % len(self.ranks)
        return token * len(self.ranks) // self.num_tokens

    def words(self) -> dict[str, str]:
        return {
            "x": f"[{self.num_tokens}, {self.inputs}]",
            "out": " + ".join(map(str, self.sizes)),
            "adapters": str(len(self.ranks)),
            "rank": " to ".join(map(str, sorted({min(self.ranks), max(self.ranks)}))) if self.ranks else "-",
        }

    def num_bytes(self) -> int:
        """Count tokens and the weights of each rank read once, outputs read and written once."""
        values = sum(self.ranks) * (self.inputs * len(self.sizes) + self.outputs)
        if self.ranks:
            values += self.num_tokens * (self.inputs + 2 * self.outputs)
        return values * self.dtype.itemsize

    def num_flops(self) -> int:
        """Count a multiplication and an addition per token, rank and input or output."""
        ranks = sum(self.ranks[self.slot(token)] for token in range(self.num_tokens)) if self.ranks else 0
        return 2 * ranks * (self.inputs * len(self.sizes) + self.outputs)


class Batch(batch.Batch[Shape]):
    """Tokens, outputs before the adapters are added, and weights; those behind an adapter's rank are NaN."""

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        super().__init__(shape, seed_name, device)
        slices, rank = len(shape.sizes), shape.max_rank
        self.x = self.normal(shape.num_tokens, shape.inputs, dtype=shape.dtype)
        self.first_out = self.normal(shape.num_tokens, shape.outputs, dtype=shape.dtype)
        # [slots, S, R, in] and [slots, R, out]
        self.a = self.normal(shape.num_slots, slices, rank, shape.inputs, dtype=shape.dtype) * shape.inputs**-0.5
        self.b = self.normal(shape.num_slots, rank, shape.outputs, dtype=shape.dtype) * rank**-0.5
        for slot, own in enumerate(shape.ranks):
            self.a[slot, :, own:] = torch.nan
            self.b[slot, own:] = torch.nan
        self.token_slots = torch.tensor([shape.slot(t) for t in range(shape.num_tokens)], dtype=torch.int32)
        self.token_slots = self.token_slots.to(device)

    def new_out(self) -> Tensor:
        """Return a copy of the outputs before the adapters are added."""
        return self.first_out.clone()

    def expected(self) -> dict[str, Tensor]:
        """Return the outputs `[T, out]`, computed in fp64."""
        y = self.first_out.double()
        for slot, rank in enumerate(self.shape.ranks):
            own = (self.token_slots == slot).nonzero()[:, 0]
            begin = 0
            for i, size in enumerate(self.shape.sizes):
                columns = slice(begin, begin + size)
                s = self.x[own].double() @ self.a[slot, i, :rank].double().T
                y[own, columns] += SCALE * (s @ self.b[slot, :rank, columns].double())
                begin += size
        return {"out": y.float()}
