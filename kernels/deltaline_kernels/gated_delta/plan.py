"""How long rows are cut into parts that run at once.

A row in parts is walked twice: that pays from three parts on, of some length. Microseconds on an H200, heads of 128,
whole, and in parts of so many tokens:

    rows x tokens, heads    whole   1024   2048   2752   3648   4096
    1 x 32768, 2/8           1082    387    325           366    333
    1 x 8192, 16/32           335    349    310    306           322
    1 x 2048, 16/32            89    104
    8 x 2048, 16/32           316    480
    37 to 8000, 16/32         463           523                  481
"""

from deltaline_kernels.device.delta_rule.inputs import DeltaHeads
from deltaline_kernels.device.row_splits import RowSplits, cut_rows

CHUNK = 64
# A program walks with so many rows of one head's state; so many programs run at once on an H200.
BLOCK_V = 64
PROGRAMS = 264
FEWEST_PARTS, SHORTEST_PART = 3, 1024
# Joining parts of larger keys would need more shared memory than there is.
LARGEST_KEY = 128


def choose_plan(heads: DeltaHeads, num_rows: int, num_tokens: int, max_length: int) -> RowSplits:
    """Return the plan of a batch whose rows have at most `max_length` tokens: as many parts as run at once."""
    if heads.key_dim > LARGEST_KEY:
        return RowSplits(1, max(1, max_length))
    programs = heads.num_value_heads * -(-heads.value_dim // BLOCK_V)
    return cut_rows(
        programs,
        num_rows,
        num_tokens,
        max_length,
        at_once=PROGRAMS,
        fewest=FEWEST_PARTS,
        shortest=SHORTEST_PART,
        chunk=CHUNK,
    )
