"""The inputs of one case of the Mamba2 recurrence. Knows no implementation."""

from __future__ import annotations

from torch import Tensor

from deltaline_bench.mamba2.shape import Shape
from deltaline_bench.mamba2.truth import Tokens, read_tokens
from deltaline_bench.recurrence import batch as recurrence


class Batch(recurrence.Batch[Shape, Tokens]):
    """packed: xBC `[T, D]` and the raw time step dt `[T, H]`."""

    D: Tensor

    def draw_weights(self) -> None:
        self.D = self.normal(self.shape.num_value_heads)

    def draw(self, count: int) -> tuple[Tensor, ...]:
        """Draw xBC and dt."""
        shape = self.shape
        xBC, dt = self.normal(count, shape.channels), self.normal(count, shape.num_value_heads) * 0.5
        return xBC.to(shape.dtype), dt.to(shape.dtype)

    def read(self, packed: tuple[Tensor, ...]) -> Tokens:
        return read_tokens(self.shape, packed, self.A_log, self.D, self.dt_bias)
