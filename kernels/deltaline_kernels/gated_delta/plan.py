"""How long rows are cut into parts that run at once.

A row in parts is walked twice: that pays from three parts on, of some length. Microseconds on an H200, heads of 128, in
so many parts:

    rows x tokens, heads    whole     2     3     4     8    10    12    13    14    16
    1 x 1024, 16/32            60    61          60
    1 x 2048, 16/32           100          81    80
    1 x 3072, 16/32                       106   101
    1 x 8192, 16/32                       231   209
    2 x 2048, 16/32           105   116
    1 x 2048, 2/8             103          73    66    63
    1 x 4096, 2/8                                93    78                81
    1 x 8192, 2/8                                     108         105   104
    1 x 32768, 2/8                                          281   250   241   264   255
"""

from deltaline_kernels.device.delta_rule.inputs import DeltaHeads
from deltaline_kernels.device.row_splits import RowSplits, count_long_rows, cut_rows

CHUNK = 64
# A program walks with so many rows of one head's state. So many run at once on an H200, half as many where they have
# twice the rows; and so many of a first walk.
BLOCK_V = 64
PROGRAMS, FIRST_PROGRAMS = 264, 396
FEWEST_PARTS, SHORTEST_PART = 3, 512
# Joining parts of larger keys would need more shared memory than there is.
LARGEST_KEY = 128


def choose_plan(heads: DeltaHeads, num_rows: int, num_tokens: int, max_length: int) -> RowSplits:
    """Return the plan of a batch whose rows have at most `max_length` tokens: as many parts as run at once."""
    if heads.key_dim > LARGEST_KEY:
        return RowSplits(1, max(1, max_length))
    num_heads = heads.num_value_heads * count_long_rows(num_tokens, max_length)
    blocks_v, blocks_k = (-(-size // BLOCK_V) for size in (heads.value_dim, heads.key_dim))
    # In the first walk, which needs no P of a row's first part, and nothing of its last one.
    first_at_once = (FIRST_PROGRAMS // num_heads + blocks_v + 2 * blocks_k) // (blocks_v + blocks_k)
    return cut_rows(
        min(first_at_once, PROGRAMS // (num_heads * blocks_v)),
        num_rows,
        num_tokens,
        max_length,
        fewest=FEWEST_PARTS,
        shortest=SHORTEST_PART,
        chunk=CHUNK,
    )
