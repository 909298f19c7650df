"""The sizes of one case of the gated delta rule, how its tokens are distributed, and its operations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deltaline_bench.lines import Mode
from deltaline_bench.recurrence import shape as recurrence
from deltaline_bench.recurrence.batch import STEP
from deltaline_bench.recurrence.shape import CHUNK


@dataclass(frozen=True)
class Inputs:
    """How the tokens are distributed.

    Args:
        alike: part of each key that all keys of its head share; 0 for independent ones.
        step: bounds of softplus(dt_bias), uniform in the logarithm; exp(g) is near 1 for small ones, near 0 for large.
        write: mean of b; sigmoid(4) is 0.98.
    """

    alike: float = 0.0
    step: tuple[float, float] = STEP
    write: float = 0.0


@dataclass(frozen=True)
class Shape(recurrence.Shape):
    """Tokens are q | k | v and the gates a, b; weights of a head are A_log, dt_bias."""

    num_key_heads: int = 16
    num_value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    inputs: Inputs = Inputs()

    PACKED = "qkv"
    NUM_GATES = 2
    NUM_WEIGHTS = 2

    def heads(self) -> str:
        return f"{self.num_key_heads}/{self.num_value_heads} of {self.key_dim}/{self.value_dim}"

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of q and k `[T, H, K]` and v `[T, HV, V]`."""
        q, k, v = packed.split((self.keys, self.keys, self.values), dim=-1)
        q, k = (x.unflatten(-1, (self.num_key_heads, self.key_dim)) for x in (q, k))
        return q, k, v.unflatten(-1, (self.num_value_heads, self.value_dim))

    def num_flops(self, num_replayed: int = 0) -> int:
        """Count as the base says.

        PREFILL, chunked by C = 64: per token and key head k k^T and q k^T (2 C K each); per token and value head
        k h^T, q h^T and u^T k (2 K V each), T (v - k h^T) and scores u (2 C V each). T itself, the inverse of a
        triangle per chunk, is not counted. DECODE and VERIFY, token by token: h k, h q and u k^T (2 K V each) and the
        decay (K V); a replayed draft has u^T k and the decay alone.
        """
        square = self.key_dim * self.value_dim
        if self.mode is Mode.PREFILL:
            shared = 4 * CHUNK * self.key_dim
            own = 6 * square + 4 * CHUNK * self.value_dim
            return self.num_tokens * (self.num_key_heads * shared + self.num_value_heads * own)
        return self.num_value_heads * square * (7 * self.num_tokens + 3 * num_replayed)
