"""Which tile of a head's state a program of the Mamba2 kernels holds, and how long rows are walked through."""

from dataclasses import dataclass

from deltaline_kernels.device.row_splits import RowSplits, cut_rows
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
# those of two matrix instructions; parts, registers, and records that are asked for before the state has come, of a
# program's one warp, for few and many.
ROW_THREADS, LOAD_BYTES = 4, 16
SHORT_ROWS = 16
FEW_SHORT, MANY_SHORT = (1, 168, 2), (2, 255, 3)

# Long rows of 16-bit values, in chunks. Microseconds on an H200, heads of 64, state 128, whole, and in so many parts:
#
#     rows x tokens, heads    whole     2     3     4     8    16
#     1 x 32768, 16             915                328   181   142
#     1 x 8192, 16              208                 89    58    60
#     1 x 8192, 128             247   231   271   251   285
#     1 x 2048, 128              68    71          87
#     8 x 2048, 128             355   459
#
# Those are of single blocks, before C B^T was begun ahead. By pairs of them, with ends in pieces, 1 x 8192 takes 202 in
# two parts where single ones take 211 whole; 1 x 2048 takes 64 and 62.
CHUNK = 64
# A program walks with so many rows of one head's state; so many programs run at once on an H200.
BLOCK_P = 64
PROGRAMS = 264
# From so many blocks of all rows and parts on, a program on Hopper has two: nearly each multiprocessor has one then.
MANY_BLOCKS = 256
# A row in parts is walked twice, the first time with a quarter of the products: two parts pay only where they are long.
FEWEST_PARTS, SHORTEST_PART = 3, 512
SHORTEST_HALF = 2048


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


def choose_plan(heads: MambaHeads, num_rows: int, num_tokens: int, max_length: int) -> RowSplits:
    """Return the plan of a batch whose rows have at most `max_length` tokens: as many parts as run at once."""
    halves_pay = max_length >= 2 * SHORTEST_HALF
    return cut_rows(
        heads.num_heads * -(-heads.head_dim // BLOCK_P),
        num_rows,
        num_tokens,
        max_length,
        at_once=PROGRAMS,
        fewest=2 if halves_pay else FEWEST_PARTS,
        shortest=SHORTEST_PART,
        chunk=CHUNK,
    )


def choose_pieces(heads: MambaHeads, num_rows: int, plan: RowSplits) -> RowSplits:
    """Return how the first walk cuts the parts of `plan` but the last: in as many equal pieces as run at once."""
    before = plan.num_parts - 1
    if before == 0:
        return plan
    programs = num_rows * before * heads.num_heads * -(-heads.head_dim // BLOCK_P)
    most = max(1, min(PROGRAMS // programs, plan.part_length // SHORTEST_PART))
    num_chunks = plan.part_length // CHUNK
    num_pieces = max(count for count in range(1, most + 1) if num_chunks % count == 0)
    return RowSplits(before * num_pieces, plan.part_length // num_pieces)
