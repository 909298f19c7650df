"""The sizes of an attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """`num_queries` heads of queries, of which as many share each of `num_keys` heads of keys and values."""

    num_queries: int
    num_keys: int
    key_dim: int
    value_dim: int
    scale: float

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.num_queries // self.num_keys
