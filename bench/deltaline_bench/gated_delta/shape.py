"""The rows and sizes of one case of the gated delta rule, and the least work that they need. Holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

# Tokens per chunk of the chunked algorithm whose operations are counted.
CHUNK = 64
# Bytes of an element of A_log, dt_bias and the drafts.
FLOAT_BYTES = 4


class Mode(Enum):
    """What the rows of a batch do."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True)
class Shape:
    """`lengths` tokens per row, H key heads and HV value heads of `key_dim` and `value_dim`; `state` is its dtype.

    VERIFY: every row has the same length, and as many drafts before it may have been accepted.
    """

    mode: Mode
    lengths: tuple[int, ...]
    num_key_heads: int = 16
    num_value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    state: torch.dtype = torch.float32

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def keys(self) -> int:
        """Channels of q, and of k."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of v, and of the output."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of q | k | v."""
        return 2 * self.keys + self.values

    @property
    def record(self) -> int:
        """Numbers kept per draft: k, u, g."""
        return self.keys + self.values + self.num_value_heads

    @property
    def max_drafts(self) -> int:
        """Drafts that a line has room for."""
        return max(self.lengths) if self.mode is Mode.VERIFY else 1

    def is_fresh(self, row: int) -> bool:
        """Say whether a row starts from the zero state: every other row of a prefill."""
        return self.mode is Mode.PREFILL and row % 2 == 0

    def num_bytes(self, num_replayed: int = 0) -> int:
        """Count once each q, k, v, gate and output, the states read and written, the drafts replayed and kept.

        Args:
            num_replayed: accepted drafts of all rows.
        """
        tokens = self.num_tokens * (self.channels + self.values + 2 * self.num_value_heads) * self.dtype.itemsize
        continuing = sum(not self.is_fresh(row) for row in range(self.num_rows))
        states = (continuing + self.num_rows) * self.values * self.key_dim * self.state.itemsize
        kept = self.num_tokens if self.mode is Mode.VERIFY else 0
        drafts = (num_replayed + kept) * self.record * FLOAT_BYTES
        return tokens + states + drafts + 2 * self.num_value_heads * FLOAT_BYTES

    def num_flops(self, num_replayed: int = 0) -> int:
        """Count multiplications and additions, whole tiles where half of one is masked, no exponentials.

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
