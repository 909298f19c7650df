"""The inputs of one case of the gated delta rule. Knows no implementation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deltaline_bench.gated_delta.shape import Shape
from deltaline_bench.gated_delta.truth import Tokens, read_tokens
from deltaline_bench.recurrence import batch as recurrence


class Batch(recurrence.Batch[Shape, Tokens]):
    """packed: qkv `[T, D]` and the raw gates a, b `[T, HV]`."""

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        super().__init__(shape, seed_name, device, shape.inputs.step)

    def draw(self, count: int) -> tuple[Tensor, ...]:
        """Draw qkv, a and b."""
        shape, inputs = self.shape, self.shape.inputs
        qkv = self.normal(count, shape.channels)
        keys = qkv[:, shape.keys : 2 * shape.keys]
        keys.mul_(math.sqrt(1 - inputs.alike**2)).add_(self.normal(1, shape.keys), alpha=inputs.alike)
        a = self.normal(count, shape.num_value_heads) * 0.5
        b = self.normal(count, shape.num_value_heads) + inputs.write
        return qkv.to(shape.dtype), a.to(shape.dtype), b.to(shape.dtype)

    def draw_drafts(self) -> tuple[Tensor, ...]:
        # In this order the numbers of a name are what they were in earlier records.
        drafts = self.draw(self.shape.num_tokens)
        self.accept_drafts()
        return drafts

    def read(self, packed: tuple[Tensor, ...]) -> Tokens:
        return read_tokens(self.shape, packed, self.A_log, self.dt_bias)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of q and k `[T, H, K]` and v `[T, HV, V]`."""
        return self.shape.split(self.packed[0])
