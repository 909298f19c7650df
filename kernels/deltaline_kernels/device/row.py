"""A row of a batch, as the kernels of the recurrences read it from `Rows.control`."""

import triton
import triton.language as tl

# Behind the fields of every row: the lines that the states after a row's tokens go to, a field for each token.
TOKEN_LINES = tl.constexpr(7)


@triton.jit
def load_row(control, control_stride, i_row):
    """Return a row's first token, length, read and write line, committed and replayed tokens and half of the drafts.

    What addresses are made of is int64. A row that reads no line replays nothing.
    """
    begin = tl.load(control + i_row).to(tl.int64)
    length = tl.load(control + i_row + 1) - tl.load(control + i_row)
    read = tl.load(control + control_stride + i_row).to(tl.int64)
    write = tl.load(control + 2 * control_stride + i_row).to(tl.int64)
    committed = tl.load(control + 3 * control_stride + i_row)
    replayed = tl.load(control + 4 * control_stride + i_row)
    half = tl.load(control + 5 * control_stride + i_row).to(tl.int64)
    return begin, length, read, write, committed, tl.where(read > 0, replayed, 0), half
