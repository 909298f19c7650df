"""The sizes of one case of KDA, and its operations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deltaline_bench.lines import Mode
from deltaline_bench.recurrence import shape as recurrence

# Tokens per chunk of the chunked algorithm whose operations are counted.
CHUNK = 16


@dataclass(frozen=True)
class Shape(recurrence.Shape):
    """Tokens are q | k | v, a gate of each key channel and one of each head; weights are A_log and dt_bias.

    lower_bound: of the log decays; None: there is none.
    """

    num_key_heads: int = 64
    num_value_heads: int = 64
    key_dim: int = 128
    value_dim: int = 128
    lower_bound: float | None = -5.0

    PACKED = "qkv"
    NUM_GATES = 1
    NUM_WEIGHTS = 1

    @property
    def num_decays(self) -> int:
        return self.num_value_heads * self.key_dim

    @property
    def num_gates(self) -> int:
        return super().num_gates + self.num_decays

    @property
    def num_weights(self) -> int:
        return super().num_weights + self.num_decays

    def heads(self) -> str:
        return f"{self.num_key_heads}/{self.num_value_heads} of {self.key_dim}/{self.value_dim}"

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of q and k `[T, H, K]` and v `[T, HV, V]`."""
        q, k, v = packed.split((self.keys, self.keys, self.values), dim=-1)
        q, k = (x.unflatten(-1, (self.num_key_heads, self.key_dim)) for x in (q, k))
        return q, k, v.unflatten(-1, (self.num_value_heads, self.value_dim))

    def num_flops(self, num_replayed: int = 0) -> int:
        """Count as the base says.

        PREFILL, chunked by C = 16: per token and value head, since decays are of its channels, k k^T and q k^T (2 C K
        each), k h^T, q h^T and u^T k (2 K V each), T (v - k h^T) and scores u (2 C V each). T itself is not counted.
        DECODE and VERIFY, token by token: h k, h q and u k^T (2 K V each) and the decay (K V); a replayed draft has
        u^T k and the decay alone.
        """
        square = self.key_dim * self.value_dim
        if self.mode is Mode.PREFILL:
            own = 6 * square + 4 * CHUNK * (self.key_dim + self.value_dim)
            return self.num_tokens * self.num_value_heads * own
        return self.num_value_heads * square * (7 * self.num_tokens + 3 * num_replayed)
