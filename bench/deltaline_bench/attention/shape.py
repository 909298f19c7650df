"""The rows and sizes of one case of attention, and the least work that they need. Holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """`lengths` keys per row, `tokens` queries in each; HQ heads of queries share HKV heads of keys.

    Args:
        soft_cap: of the scores, or None.
        is_causal: whether there is a causal mask.
        window: keys that a query sees, or None for all.
    """

    lengths: tuple[int, ...]
    tokens: int = 1
    num_queries: int = 16
    num_keys: int = 2
    dim: int = 256
    page_size: int = 64
    soft_cap: float | None = None
    is_causal: bool = True
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.tokens

    @property
    def has_modifiers(self) -> bool:
        return self.is_causal or self.soft_cap is not None or self.window is not None

    @property
    def is_ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def num_seen(self) -> int:
        """Keys that some query of their row sees."""
        if self.window is None:
            return sum(self.lengths)
        return sum(min(length, self.window + self.tokens - 1) for length in self.lengths)

    @property
    def num_bytes(self) -> int:
        """Count once each key and value that is seen, the queries and the outputs."""
        values = 2 * self.num_seen * self.num_keys + 2 * self.num_tokens * self.num_queries
        return values * self.dim * self.dtype.itemsize

    @property
    def num_flops(self) -> int:
        """Count products with keys and with values; of verifies as if every query saw all keys of its row."""
        return 4 * self.num_seen * self.tokens * self.num_queries * self.dim
