"""Which tile of a layer's state a program of the Mamba-1 kernel holds, and of how many rows, one after another."""

from dataclasses import dataclass

from deltaline_kernels.device.sizes import pow2
from deltaline_kernels.mamba1.inputs import ScanSizes

PIECE = 4
# States of a channel in a thread.
MOST_STATES = 16


@dataclass(frozen=True)
class Tile:
    """`split` threads a channel; so many rows by a program; so many tokens of a row on their way at once."""

    split: int
    rows: int = 1
    at_once: int = 1
    num_warps: int = 1
    deal: int = 1
    max_registers: int | None = None

    @property
    def channels(self) -> int:
        return 32 * self.num_warps // self.split

    def pieces(self, state_dim: int) -> int:
        """Return in how many pieces a thread has its states of a channel."""
        return max(1, pow2(state_dim) // (PIECE * self.split))


def choose_tile(sizes: ScanSizes, num_rows: int, max_length: int, *, short: bool) -> Tile:
    """Return the tile for so many rows of at most so many tokens."""
    least = max(1, pow2(sizes.state_dim) // MOST_STATES)
    return Tile(least)
