"""How long rows are cut into parts that run at once.

A row in parts is walked twice. Microseconds of walks and joins on an H200, heads of 128, whole, and in parts of so many
tokens:

    rows x tokens, heads    whole    512   1024   2048   4096
    1 x 8192, 8               190    111     88
    1 x 65536, 4                                   279    240
"""

from deltaline_kernels.device.delta_rule.inputs import DeltaHeads
from deltaline_kernels.device.row_splits import RowSplits, count_long_rows, cut_rows

CHUNK = 64
# A program walks with so many rows of one head's state; so many programs run at once on an H200.
BLOCK_V = 64
PROGRAMS = 132
FEWEST_PARTS, SHORTEST_PART = 3, 512
# From so many heads of all rows on, walks of whole rows take so many rows of the state, so that a chunk is copied once
# for them. Of fewer heads that would leave too few programs.
MANY_HEADS, MANY_BLOCK_V = 2 * PROGRAMS, 128


def choose_plan(heads: DeltaHeads, num_rows: int, num_tokens: int, max_length: int) -> RowSplits:
    """Return the plan of a batch whose rows have at most `max_length` tokens: as many parts as run at once."""
    programs = heads.num_value_heads * -(-heads.value_dim // BLOCK_V)
    return cut_rows(
        PROGRAMS // (programs * count_long_rows(num_tokens, max_length)),
        num_rows,
        num_tokens,
        max_length,
        fewest=FEWEST_PARTS,
        shortest=SHORTEST_PART,
        chunk=CHUNK,
    )
