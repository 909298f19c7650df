"""Where the chunks of packed rows are, in Triton: a slot each, without a table that a host would have to make."""

import triton
import triton.language as tl

ROWS_AT_ONCE = tl.constexpr(128)
FAR = tl.constexpr(0x7FFFFFFF)


@triton.jit
def find_chunk(control, num_rows, i_slot, CHUNK: tl.constexpr):
    """Return the first token of the chunk in a slot, the end of its row, and whether there is one.

    Row i has the slots from query_start_loc[i] // CHUNK + i on: enough for each, and none twice. So `T // CHUNK + N`
    slots are enough for N rows of T tokens.
    """
    i_row, begin, end = -1, 0, FAR
    o_row = tl.arange(0, ROWS_AT_ONCE)
    for known in range(0, num_rows + 1, ROWS_AT_ONCE):
        starts = tl.load(control + known + o_row, mask=known + o_row <= num_rows, other=FAR)
        is_before = starts // CHUNK + known + o_row <= i_slot
        i_row += tl.sum(is_before.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(is_before, starts, 0), 0))
        end = tl.minimum(end, tl.min(tl.where(is_before, FAR, starts), 0))
    first = (i_slot - i_row - begin // CHUNK) * CHUNK + begin
    return first, end, (i_row >= 0) & (i_row < num_rows) & (first < end)
