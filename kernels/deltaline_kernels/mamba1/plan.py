"""Which tile of a layer's state a program of the Mamba-1 kernel holds, and how many rows and tokens it takes."""

from dataclasses import dataclass

from deltaline_kernels.device.sizes import cdiv, pow2
from deltaline_kernels.mamba1.inputs import ScanSizes

# States that a thread has of a channel: as a load brings them, and at most.
PIECE, MOST_STATES = 4, 16
# Warps that run at once on an H200, one to a scheduler.
SCHEDULERS = 528
MANY_DECODES = 16384


@dataclass(frozen=True)
class Tile:
    """What a program takes.

    Args:
        split: threads that share a channel.
        rows: rows, one after another.
        at_once: tokens of a row that are on their way at once; a divisor of the distance of two waypoints.
        deal: tokens of a group, of which each thread of a channel has one: 1, or as many as `split`, of which `at_once`
            is a multiple. Of short rows 1.
        max_registers: of a thread; None: as many as the compiler takes.
    """

    split: int
    rows: int = 1
    at_once: int = 1
    deal: int = 1
    num_warps: int = 1
    max_registers: int | None = None

    @property
    def channels(self) -> int:
        return 32 * self.num_warps // self.split

    def pieces(self, state_dim: int) -> int:
        """Return in how many pieces a thread has its states of a channel."""
        return max(1, pow2(state_dim) // (PIECE * self.split))


def choose_tile(sizes: ScanSizes, num_rows: int, max_length: int, *, short: bool) -> Tile:
    """Return the tile for so many rows of at most so many tokens; `short`: a row of them may be a VERIFY."""
    least = max(1, pow2(sizes.state_dim) // MOST_STATES)
    programs = num_rows * sizes.num_groups * cdiv(sizes.group_channels, 32 // least)
    if max_length <= 1:
        return Tile(least, rows=4, max_registers=128) if programs > MANY_DECODES else Tile(least)
    if short:
        return Tile(least, max_registers=80)
    if programs > SCHEDULERS:
        return Tile(least, at_once=2, max_registers=128)
    split = min(2 * least, max(1, pow2(sizes.state_dim) // PIECE))
    return Tile(split, at_once=8)
