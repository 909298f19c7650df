"""The sizes of one case of the Mamba2 recurrence, and its operations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deltaline_bench.lines import Mode
from deltaline_bench.recurrence import shape as recurrence
from deltaline_bench.recurrence.shape import CHUNK


@dataclass(frozen=True)
class Shape(recurrence.Shape):
    """Tokens are x | B | C and the time step; weights of a head are A_log, D, dt_bias."""

    num_key_heads: int = 8
    num_value_heads: int = 128
    key_dim: int = 128
    value_dim: int = 64

    PACKED = "xBC"
    NUM_GATES = 1
    NUM_WEIGHTS = 3

    def heads(self) -> str:
        return f"{self.num_value_heads} of {self.value_dim} x {self.key_dim}, {self.num_key_heads} groups"

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of x `[T, H, P]`, B and C `[T, G, S]`."""
        x, B, C = packed.split((self.values, self.keys, self.keys), dim=-1)
        B, C = (part.unflatten(-1, (self.num_key_heads, self.key_dim)) for part in (B, C))
        return x.unflatten(-1, (self.num_value_heads, self.value_dim)), B, C

    def num_flops(self, num_replayed: int = 0) -> int:
        """Count as the base says.

        PREFILL, chunked by C = 64: per token and group C B^T (2 C S); per token and head C h^T and u^T B (2 P S each)
        and scores u (2 C P). DECODE and VERIFY, token by token: h C and u B^T (2 P S each) and the decay (P S); a
        replayed draft has u B^T and the decay alone.
        """
        square = self.value_dim * self.key_dim
        if self.mode is Mode.PREFILL:
            own = 4 * square + 2 * CHUNK * self.value_dim
            return self.num_tokens * (self.num_key_heads * 2 * CHUNK * self.key_dim + self.num_value_heads * own)
        return self.num_value_heads * square * (5 * self.num_tokens + 3 * num_replayed)
