"""Which tile of a layer's state a program of the Mamba-1 kernel holds, and how many tokens it asks for at once.

Microseconds on an H200, 8,192 channels of 16 states in fp32, by 1, 2 or 4 threads a channel:

    rows x tokens         1, of 1 token   1, 80 registers   2, of 1 token
    64 decodes                     21.7              23.6            25.4
    256 decodes                    82.7              83.8
    64 verifies of 5               54.8              51.3            68.8

    rows x tokens         1, of 2   1, of 2, 128 registers   1, of 4   2, of 4   2, of 8   4, of 4   4, of 8
    8 x 2048                1,558                    1,334     1,385
    1 x 8192                2,678                              2,235     1,308     1,193     1,405     1,237
    1 x 2048                                                               330       304                 314
"""

from dataclasses import dataclass

from deltaline_kernels.device.sizes import cdiv, pow2
from deltaline_kernels.mamba1.inputs import ScanSizes

# States that a thread has of a channel: as a load brings them, and at most.
PIECE, MOST_STATES = 4, 16
# Warps that run at once on an H200 if each scheduler has one.
SCHEDULERS = 528


@dataclass(frozen=True)
class Tile:
    """What a program takes, a warp.

    Args:
        split: threads that share a channel.
        at_once: tokens of a row that are on their way at once; a divisor of the distance of two waypoints.
        max_registers: of a thread; None: as many as the compiler takes.
    """

    split: int
    at_once: int = 1
    max_registers: int | None = None

    @property
    def channels(self) -> int:
        return 32 // self.split

    def pieces(self, state_dim: int) -> int:
        """Return in how many pieces a thread has its states of a channel."""
        return max(1, pow2(state_dim) // (PIECE * self.split))


def choose_tile(sizes: ScanSizes, num_rows: int, max_length: int, *, short: bool) -> Tile:
    """Return the tile for so many rows of at most so many tokens; `short`: a row of them may be a VERIFY."""
    least = max(1, pow2(sizes.state_dim) // MOST_STATES)
    if max_length <= 1:
        return Tile(least)
    if short:
        return Tile(least, max_registers=80)
    if num_rows * sizes.num_groups * cdiv(sizes.group_channels, 32 // least) > SCHEDULERS:
        return Tile(least, at_once=2, max_registers=128)
    return Tile(min(2 * least, max(1, pow2(sizes.state_dim) // PIECE)), at_once=8)
