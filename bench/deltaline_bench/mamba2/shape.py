"""The rows and sizes of one case of the Mamba2 recurrence, and the least work that they need. Holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltaline_bench.gated_delta.shape import CHUNK, FLOAT_BYTES, Mode

# Vectors of a value per head: A_log, D, dt_bias.
HEAD_WEIGHTS = 3


@dataclass(frozen=True)
class Shape:
    """`lengths` tokens per row, H heads of `head_dim` in G groups; `state` is the dtype of the states.

    VERIFY: every row has the same length, and as many drafts before it may have been accepted.
    """

    mode: Mode
    lengths: tuple[int, ...]
    num_groups: int = 8
    num_heads: int = 128
    head_dim: int = 64
    state_dim: int = 128
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
        """Channels of B, and of C."""
        return self.num_groups * self.state_dim

    @property
    def values(self) -> int:
        """Channels of x, and of the output."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of x | B | C."""
        return self.values + 2 * self.keys

    @property
    def record(self) -> int:
        """Numbers kept per draft: B, u, g."""
        return self.keys + self.values + self.num_heads

    @property
    def max_drafts(self) -> int:
        """Drafts that a line has room for."""
        return max(self.lengths) if self.mode is Mode.VERIFY else 1

    def is_fresh(self, row: int) -> bool:
        """Say whether a row starts from the zero state: every other row of a prefill."""
        return self.mode is Mode.PREFILL and row % 2 == 0

    def num_bytes(self, num_replayed: int = 0) -> int:
        """Count once each x, B, C, dt and output, the states read and written, the drafts replayed and kept.

        Args:
            num_replayed: accepted drafts of all rows.
        """
        tokens = self.num_tokens * (self.channels + self.values + self.num_heads) * self.dtype.itemsize
        continuing = sum(not self.is_fresh(row) for row in range(self.num_rows))
        states = (continuing + self.num_rows) * self.values * self.state_dim * self.state.itemsize
        kept = self.num_tokens if self.mode is Mode.VERIFY else 0
        drafts = (num_replayed + kept) * self.record * FLOAT_BYTES
        return tokens + states + drafts + HEAD_WEIGHTS * self.num_heads * FLOAT_BYTES

    def num_flops(self, num_replayed: int = 0) -> int:
        """Count multiplications and additions, whole tiles where half of one is masked, no exponentials.

        PREFILL, chunked by C = 64: per token and group C B^T (2 C S); per token and head C h^T and u^T B (2 P S each)
        and scores u (2 C P). DECODE and VERIFY, token by token: h C and u B^T (2 P S each) and the decay (P S); a
        replayed draft has u B^T and the decay alone.
        """
        square = self.head_dim * self.state_dim
        if self.mode is Mode.PREFILL:
            own = 4 * square + 2 * CHUNK * self.head_dim
            return self.num_tokens * (self.num_groups * 2 * CHUNK * self.state_dim + self.num_heads * own)
        return self.num_heads * square * (5 * self.num_tokens + 3 * num_replayed)
