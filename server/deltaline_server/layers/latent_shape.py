"""Sizes and constants of latent attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.rope_scaling import RopeScaling


@dataclass(frozen=True)
class LatentShape:
    """Sizes and constants of a latent attention mixer, of the whole layer or of one rank's share.

    latent_dim: channels C of the latent that a token is kept as; behind_dim: those behind it that all heads' keys end
    with. key_dim, value_dim: channels K and V that a head's key and value have of the latent. query_rank: channels of
    which queries are made, 0 where that is hidden states. rotary_dim: the channels behind a latent, which are rotated,
    0 where they are not; rope_theta, rope_scaling: as of AttentionShape. max_positions: most tokens of a sequence.
    max_selected: most tokens of one whose attention is not sparse, 0 where none is.
    """

    num_heads: int
    latent_dim: int
    behind_dim: int
    key_dim: int
    value_dim: int
    query_rank: int
    max_positions: int
    rotary_dim: int = 0
    rope_theta: float = 1.0
    rope_scaling: RopeScaling | None = None
    max_selected: int = 0

    @property
    def num_kv_heads(self) -> int:
        """Heads of what is kept: all heads share the one latent of a token."""
        return 1

    @property
    def head_dim(self) -> int:
        """Channels of what is kept of a token, C and those behind."""
        return self.latent_dim + self.behind_dim

    @property
    def page_parts(self) -> int:
        """Tensors of pages: values are among the channels of keys."""
        return 1

    @property
    def query_channels(self) -> int:
        """Channels of all queries as they are projected."""
        return self.num_heads * (self.key_dim + self.behind_dim)

    @property
    def scale(self) -> float:
        """Of the products of queries and keys."""
        return float((self.key_dim + self.behind_dim) ** -0.5)

    @property
    def table_channels(self) -> int:
        """Values that the table of rotations has of a position: where none are rotated, those of a pair that stays."""
        return max(2, self.rotary_dim)

    def test_sizes(self) -> dict[str, Any]:
        """The arguments of the kernels' self-test for a model with such mixers."""
        return {
            "recurrence": "latent_attention",
            "num_key_heads": 1,
            "num_value_heads": self.num_heads,
            "key_dim": self.head_dim,
            "value_dim": self.latent_dim,
            "rotary_dim": self.table_channels,
        }

    def shard(self, world_size: int) -> Self:
        """Return one rank's share: whole heads, and all latents. Raises ModelError if that can't be done."""
        if self.num_heads % world_size:
            raise ModelError(f"--tensor-parallel: expected a divisor of {self.num_heads} query heads, got {world_size}")
        return replace(self, num_heads=self.num_heads // world_size)
