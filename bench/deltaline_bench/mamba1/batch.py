"""The inputs of one case of the Mamba-1 recurrence. Knows no implementation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.lines import Mode
from deltaline_bench.mamba1.shape import Shape
from deltaline_bench.mamba1.truth import Tokens
from deltaline_bench.recurrence import batch as recurrence


class Batch(recurrence.Batch[Shape, Tokens]):
    """packed: x, the raw time step and z `[T, D]`, and B | C `[T, 2*S]`."""

    D: Tensor

    def draw_weights(self) -> None:
        """Draw the channels' weights: A_log of each state, and in place of a head's dt_bias one of each channel."""
        channels, states = self.shape.value_dim, self.shape.key_dim
        self.A_log = self.uniform(channels, states).mul(15).add(1).log()
        low, high = (math.log(bound) for bound in recurrence.STEP)
        self.dt_bias = self.uniform(channels).mul(high - low).add(low).exp().expm1().log()
        self.D = self.normal(channels)

    def draw(self, count: int) -> tuple[Tensor, ...]:
        """Draw x, the raw time step, z, and B | C."""
        shape = self.shape
        x, dt, z = (self.normal(count, shape.value_dim) for _ in range(3))
        return tuple(part.to(shape.dtype) for part in (x, dt * 0.5, z, self.normal(count, 2 * shape.key_dim)))

    def read(self, packed: tuple[Tensor, ...]) -> Tokens:
        x, dt, z, BC = (part.double() for part in packed)
        step = F.softplus(dt + self.dt_bias.double())
        B, C = BC.chunk(2, dim=-1)
        rate = -self.A_log.double().exp()
        return Tokens(B, C, step * x, step, self.D.double() * x, z * torch.sigmoid(z), rate)

    def expected(self) -> dict[str, Tensor]:
        """Return the truth as the base says; of a prefill also `fresh o`, `fresh state`: of the fresh rows alone."""
        found = super().expected()
        if self.shape.mode is not Mode.PREFILL:
            return found
        lengths = torch.tensor(self.shape.lengths, device=self.device)
        is_fresh = ~self.continues.repeat_interleave(lengths)
        return {**found, "fresh o": found["o"][is_fresh], "fresh state": found["state"][~self.continues]}
