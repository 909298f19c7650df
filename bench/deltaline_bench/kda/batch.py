"""The inputs of one case of KDA. Knows no implementation."""

from __future__ import annotations

import math

from torch import Tensor

from deltaline_bench.kda.shape import Shape
from deltaline_bench.kda.truth import Tokens, read_tokens
from deltaline_bench.recurrence import batch as recurrence


class Batch(recurrence.Batch[Shape, Tokens]):
    """packed: qkv `[T, D]` and the raw gates a `[T, HV*K]`, b `[T, HV]`."""

    def draw_weights(self) -> None:
        """Draw a bias of each key channel in place of one of each head."""
        low, high = (math.log(bound) for bound in recurrence.STEP)
        self.dt_bias = self.uniform(self.shape.num_decays).mul(high - low).add(low).exp().expm1().log()

    def draw(self, count: int) -> tuple[Tensor, ...]:
        """Draw qkv, a and b."""
        shape = self.shape
        qkv, b = self.normal(count, shape.channels), self.normal(count, shape.num_value_heads)
        # Wide enough that a bound, too, has channels that keep and channels that forget.
        a = self.normal(count, shape.num_decays) * 2
        return qkv.to(shape.dtype), a.to(shape.dtype), b.to(shape.dtype)

    def read(self, packed: tuple[Tensor, ...]) -> Tokens:
        return read_tokens(self.shape, packed, self.A_log, self.dt_bias)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of q and k `[T, H, K]` and v `[T, HV, V]`."""
        return self.shape.split(self.packed[0])
