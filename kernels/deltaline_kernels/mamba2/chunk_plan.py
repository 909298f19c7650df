"""How long rows of 16-bit values are walked through. Knows sizes, no tensors and no kernels.

Not measured yet: set from the numbers of instructions and bytes.
"""

from deltaline_kernels.mamba2.heads import Heads
from deltaline_kernels.parts import Plan, cut_rows

CHUNK = 64
# A program walks with so many rows of one head's state; so many programs run at once on an H200.
BLOCK_P = 64
PROGRAMS = 264
# A row in parts is walked twice, the first time with a quarter of the products. Two parts beside each other on a
# multiprocessor take about as long as what the first walk saves.
FEWEST_PARTS, SHORTEST_PART = 3, 512


def choose_plan(heads: Heads, num_rows: int, num_tokens: int, max_length: int) -> Plan:
    """Return the plan of a batch whose rows have at most `max_length` tokens: as many parts as run at once."""
    return cut_rows(
        heads.num_heads * -(-heads.head_dim // BLOCK_P),
        num_rows,
        num_tokens,
        max_length,
        at_once=PROGRAMS,
        fewest=FEWEST_PARTS,
        shortest=SHORTEST_PART,
        chunk=CHUNK,
    )
