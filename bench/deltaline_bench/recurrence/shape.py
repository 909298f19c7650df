"""The rows and sizes of one case of a recurrence, and the least work that they need. Holds no tensors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltaline_bench.lines import LinesShape, Mode

# Tokens per chunk of the chunked algorithm whose operations are counted.
CHUNK = 64
# Bytes of an element of the heads' weights and of the drafts.
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Shape(LinesShape):
    """HV heads with a state `[V, K]` each share the keys and queries of H heads; `state` is the states' dtype.

    The words of Mamba2 for the same: x is the values, B the keys, C the queries; G groups of them; P is V, S is K.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    state: torch.dtype = torch.float32

    # What the report calls the packed tokens.
    PACKED: ClassVar[str]
    # Raw gates of a token per head, and weights of a head.
    NUM_GATES: ClassVar[int]
    NUM_WEIGHTS: ClassVar[int]

    @property
    def keys(self) -> int:
        """Channels of the keys, and of the queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of the values, and of the output."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of a packed token."""
        return 2 * self.keys + self.values

    @property
    def record(self) -> int:
        """Numbers kept per draft: the key, what is written (u) and the decays."""
        return self.keys + self.values + self.num_decays

    @property
    def num_decays(self) -> int:
        """Decays of a token."""
        return self.num_value_heads

    @property
    def num_gates(self) -> int:
        """Raw gates of a token."""
        return self.NUM_GATES * self.num_value_heads

    @property
    def num_weights(self) -> int:
        """Weights of the heads."""
        return self.NUM_WEIGHTS * self.num_value_heads

    @abstractmethod
    def heads(self) -> str:
        """Say the heads and their sizes, for the report."""

    @abstractmethod
    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of packed tokens `[T, channels]`: `[T, heads, dim]` each, in the order in which they lie."""

    def words(self) -> dict[str, str]:
        return {
            self.PACKED: f"[{self.num_tokens}, {self.channels}]",
            "heads": self.heads(),
            "rows": str(self.num_rows),
            "state": str(self.state).removeprefix("torch."),
        }

    @abstractmethod
    def num_flops(self, num_replayed: int = 0) -> int:
        """Count multiplications and additions, whole tiles where half of one is masked, no exponentials.

        Args:
            num_replayed: accepted drafts of all rows.
        """

    def num_bytes(self, num_replayed: int = 0) -> int:
        """Count once each token's vectors, gates and output, the states read and written, the drafts replayed and kept.

        Args:
            num_replayed: accepted drafts of all rows.
        """
        per_token = self.channels + self.values + self.num_gates
        states = (self.num_continuing + self.num_rows) * self.values * self.key_dim
        states += len(self.places) * self.values * self.key_dim
        kept = self.num_tokens if self.mode is Mode.VERIFY else 0
        floats = (num_replayed + kept) * self.record + self.num_weights
        return self.num_tokens * per_token * self.dtype.itemsize + states * self.state.itemsize + floats * FLOAT_BYTES
