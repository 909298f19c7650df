"""Sizes and constants of one Mamba2 layer's heads. Knows no tensors."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Sizes of one layer's heads, and the limits of a token's time step behind its softplus."""

    num_groups: int
    num_heads: int
    head_dim: int
    state_dim: int
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def values(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> int:
        """Values of one token: x, B, C."""
        return self.values + 2 * self.keys

    @property
    def record(self) -> int:
        """Values of one draft token: B, u, g."""
        return self.keys + self.values + self.num_heads

    @property
    def group(self) -> int:
        return self.num_heads // self.num_groups
