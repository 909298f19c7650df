"""The rows and sizes of one case of attention, and the least work that they need. Holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltaline_bench import batch

# More tokens are a prefill.
MOST_SHORT = 16


@dataclass(frozen=True)
class Shape(batch.Shape):
    """`lengths` keys per row, `tokens` queries in each; HQ heads of queries share HKV heads of keys.

    Args:
        soft_cap: of the scores, or None.
        is_causal: whether there is a causal mask.
        window: keys that a query sees, or None for all.
        value_dim: of latents: the values are the first value_dim channels of the keys. None: they have pages of their
            own.
        scale: of the products of queries and keys; None: dim ** -0.5.
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
    value_dim: int | None = None
    scale: float | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.tokens

    @property
    def out_dim(self) -> int:
        """Channels of a value, and of an output."""
        return self.dim if self.value_dim is None else self.value_dim

    @property
    def kept_dim(self) -> int:
        """Channels that a head keeps of a token: those of its key and, where they are not among them, of its value."""
        return 2 * self.dim if self.value_dim is None else self.dim

    @property
    def is_ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def num_seen(self) -> int:
        """Keys that some query of their row sees."""
        if self.window is None:
            return sum(self.lengths)
        return sum(min(length, self.window + self.tokens - 1) for length in self.lengths)

    def words(self) -> dict[str, str]:
        modifiers = [f"soft cap {self.soft_cap}"] if self.soft_cap is not None else []
        modifiers += ["causal"] if self.is_causal else []
        modifiers += [f"window {self.window}"] if self.window is not None else []
        lengths = f"{min(self.lengths)}..{max(self.lengths)}" if self.is_ragged else str(self.lengths[0])
        values = "" if self.value_dim is None else f", values their first {self.value_dim}"
        return {
            "rows": f"{self.num_rows} of {self.tokens}",
            "keys": lengths,
            "heads": f"{self.num_queries}/{self.num_keys} of {self.dim}{values}",
            "page": str(self.page_size),
            "modifiers": ", ".join(modifiers) or "none",
        }

    def num_bytes(self) -> int:
        """Count once each key and value that is seen, the queries and the outputs."""
        kept = self.num_seen * self.num_keys * self.kept_dim
        return (kept + self.num_tokens * self.num_queries * (self.dim + self.out_dim)) * self.dtype.itemsize

    @property
    def max_short(self) -> int:
        """Tokens of rows that are short: those of a decode or a verify."""
        return min(self.tokens, MOST_SHORT)

    def num_flops(self) -> int:
        """Count products with keys and with values; of short rows as if every query saw all keys of its row."""
        pairs = self.num_seen * self.tokens
        if self.is_causal and self.tokens > self.max_short:
            pairs -= self.num_tokens * (self.tokens - 1) // 2
        return 2 * pairs * self.num_queries * (self.dim + self.out_dim)
