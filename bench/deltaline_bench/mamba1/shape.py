"""The sizes of one case of the Mamba-1 recurrence, and its operations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deltaline_bench.recurrence import shape as recurrence


@dataclass(frozen=True)
class Shape(recurrence.Shape):
    """Tokens are x | B | C, a time step and a gate of each channel; weights of a channel are A_log of each state, D and
    dt_bias. One value head has all channels.
    """

    num_key_heads: int = 1
    num_value_heads: int = 1
    key_dim: int = 16
    value_dim: int = 8192

    PACKED = "xBC"
    NUM_GATES = 2
    NUM_WEIGHTS = 2

    @property
    def num_decays(self) -> int:
        return self.values

    @property
    def num_gates(self) -> int:
        return self.NUM_GATES * self.values

    @property
    def num_weights(self) -> int:
        return (self.key_dim + self.NUM_WEIGHTS) * self.values

    def heads(self) -> str:
        return f"{self.value_dim} channels of {self.key_dim} states"

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of x `[T, 1, D]`, B and C `[T, 1, S]`."""
        x, B, C = packed.split((self.values, self.keys, self.keys), dim=-1)
        return x[:, None], B[:, None], C[:, None]

    def num_flops(self, num_replayed: int = 0) -> int:
        """Count as the base says: per token h C and u B^T (2 D S each), the decay and its exponent (D S each); a
        replayed draft has no h C."""
        return self.values * self.key_dim * (6 * self.num_tokens + 4 * num_replayed)
