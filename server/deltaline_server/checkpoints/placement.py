"""Where weights go: device, dtype, and the share of the heads that one rank of several holds.

Knows sizes, not tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltaline_server.checkpoints.config_reader import ModelError


@dataclass(frozen=True)
class Placement:
    """Where weights go: device and dtype, and the share of the heads that rank `rank` of `world_size` holds."""

    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ModelError(f"world_size: expected at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ModelError(f"rank: expected 0..{self.world_size - 1}, got {self.rank}")

    def share(self, size: int, start: int = 0) -> slice:
        """Return this rank's part of `size` rows or columns that begin at `start`; world_size divides size."""
        part = size // self.world_size
        return slice(start + self.rank * part, start + (self.rank + 1) * part)
