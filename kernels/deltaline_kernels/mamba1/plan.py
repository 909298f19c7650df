"""Which tile of a layer's state a program of the Mamba-1 kernel holds."""

from dataclasses import dataclass

from deltaline_kernels.device.sizes import cdiv, pow2
from deltaline_kernels.mamba1.inputs import ScanSizes

# Of the one warp of a program: what it loads of a state at once, 16 bytes a thread, of a row's at most so many.
WARP_BYTES, ROW_BYTES = 512, 128
# Values of the state in a thread's registers, beside as many rates; fewer where so many programs would not be had,
# 16 warps of each multiprocessor of an H200.
VALUES, PROGRAMS = 16, 2112


@dataclass(frozen=True)
class Tile:
    """`parts` parts of `sub` channels each, whose states are in blocks of `block_s`."""

    parts: int
    sub: int
    block_s: int

    @property
    def channels(self) -> int:
        return self.parts * self.sub


def choose_tile(sizes: ScanSizes, num_rows: int, state_bytes: int) -> Tile:
    """Return the tile for so many rows, with states whose values have so many bytes each.

    By reasoning from the tiles of Mamba2's decode; not measured yet.
    """
    block_s = max(16, min(ROW_BYTES // state_bytes, pow2(sizes.state_dim)))
    sub = WARP_BYTES // (block_s * state_bytes)
    parts = 32 * VALUES // (sub * block_s * cdiv(sizes.state_dim, block_s))
    parts = max(1, min(parts, pow2(cdiv(sizes.group_channels, sub))))
    while parts > 1 and num_rows * sizes.num_groups * cdiv(sizes.group_channels, parts * sub) < PROGRAMS:
        parts //= 2
    return Tile(parts, sub, block_s)
