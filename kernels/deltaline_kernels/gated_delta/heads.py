"""Sizes and constants of one layer's heads. Knows no tensors."""

from dataclasses import dataclass

# From so many rows x value heads on, short rows are computed by programs that take more of the state each.
MANY_HEADS = 256


@dataclass(frozen=True)
class Heads:
    """Sizes of one layer's heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    scale: float
    eps: float

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def record(self) -> int:
        """Values of one draft token: k, u, g."""
        return self.keys + self.values + self.num_value_heads

    @property
    def group(self) -> int:
        return self.num_value_heads // self.num_key_heads
