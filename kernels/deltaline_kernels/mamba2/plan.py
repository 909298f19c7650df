"""Which tile of a head's state a program of the Mamba2 kernels holds."""

from dataclasses import dataclass

from deltaline_kernels.mamba2.inputs import MambaHeads

# From so many rows x heads on, short rows are computed by programs that take more of the state each.
MANY_HEADS = 256
# Bytes of a state's row that 8 threads load at once: whole sectors. A warp has 4 such rows at a time.
ROW_BYTES = 128
ROWS_PER_WARP = 4
# With larger states the parts of many heads don't fit in the registers: a quarter of them does, with all registers.
LARGEST_STATE, MOST_REGISTERS = 128, 255


@dataclass(frozen=True)
class Tile:
    """`parts` parts of a few rows of the state each, in blocks of `block_s` values; so many records at once."""

    num_warps: int
    parts: int
    max_registers: int | None
    block_s: int
    records: int = 1


# Warps, parts and registers. Of many heads a program takes several parts of the state, so that what a token costs
# beside them is paid once: all the more where rows have several tokens, or where a state of 2 bytes per value, by which
# MANY is keyed, leaves less time. Of few heads that would leave too few programs.
FEW: tuple[int, int, int | None] = (2, 1, None)
MANY: dict[int, tuple[int, int, int | None]] = {4: (1, 2, 128), 2: (1, 8, 255)}
MANY_TOKENS: tuple[int, int, int | None] = (1, 8, 255)

# Short rows as a chunk each: threads that share a row of the state, and bytes that each loads at once; rows of a part,
# those of a matrix instruction; parts, registers and records at once of the one warp of a program, for few and many.
ROW_THREADS, LOAD_BYTES = 4, 16
SHORT_ROWS = 16
FEW_SHORT, MANY_SHORT = (1, 168, 3), (2, 224, 1)


def choose_tile(heads: MambaHeads, num_rows: int, state_bytes: int, *, one: bool) -> Tile:
    """Return the tile for rows of `one` token, or of several; `state_bytes` is the size of a value."""
    many = num_rows * heads.num_heads >= MANY_HEADS
    num_warps, parts, max_registers = (MANY[state_bytes] if one else MANY_TOKENS) if many else FEW
    if heads.state_dim > LARGEST_STATE:
        parts, max_registers = max(1, parts // 4), MOST_REGISTERS
    # Fewer values than threads would leave two threads with one value of a state that is updated in place.
    values = 1 << (heads.state_dim - 1).bit_length()
    return Tile(num_warps, parts, max_registers, max(16, min(ROW_BYTES // state_bytes, values)))


def choose_short_tile(heads: MambaHeads, num_rows: int, state_bytes: int) -> Tile:
    """Return the tile for rows of several tokens that are a chunk each."""
    parts, max_registers, records = MANY_SHORT if num_rows * heads.num_heads >= MANY_HEADS else FEW_SHORT
    return Tile(1, parts, max_registers, ROW_THREADS * LOAD_BYTES // state_bytes, records)
