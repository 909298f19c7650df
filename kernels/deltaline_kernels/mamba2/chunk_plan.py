"""How long rows of 16-bit values are walked through.

Microseconds on an H200, heads of 64, state 128, whole, and in so many parts:

    rows x tokens, heads    whole     2     3     4     8    16
    1 x 32768, 16             915                328   181   142
    1 x 8192, 16              208                 89    58    60
    1 x 8192, 128             247   231   271   251   285
    1 x 2048, 128              68    71          87
    8 x 2048, 128             355   459
"""

from deltaline_kernels.device.row_splits import RowSplits, cut_rows
from deltaline_kernels.mamba2.inputs import MambaHeads

CHUNK = 64
# A program walks with so many rows of one head's state; so many programs run at once on an H200.
BLOCK_P = 64
PROGRAMS = 264
# A row in parts is walked twice, the first time with a quarter of the products: two parts pay only where they are long.
FEWEST_PARTS, SHORTEST_PART = 3, 512
SHORTEST_HALF = 2048


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
