"""The items of work of an attention: which row, tile of queries, heads and split of the keys is the i-th one.

An item is counted only for splits that hold a live key. Nothing is kept in memory: a program counts the items of the
rows before its own from their positions and lengths, which is less work than to wait for a kernel that does so.
"""

import triton
import triton.language as tl

from deltaline_kernels.attention.modify import find_range


@triton.jit
def locate(
    item,
    control,
    control_stride,
    num_rows,
    parameters,
    blocks,
    HQ: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Return of item `item`: its row, the row's first item and splits, live keys, and how many items there are.

    Args:
        HEADS: groups of heads that are an item each. TOKENS: of a tile. ROWS: looked at at once.
        SPLIT: keys, or entries of lists of blocks, of a split; 0: the keys are not split, and no live keys are found.
        BLOCKS: the shape of `blocks`, or None.
    """
    before = item * 0
    row = item * 0
    base = item * 0
    splits = item * 0
    low = item * 0
    high = item * 0
    for first in range(0, num_rows, ROWS):
        i = first + tl.arange(0, ROWS)
        is_row = i < num_rows
        begin = tl.load(control + i, mask=is_row, other=0)
        n = tl.load(control + i + 1, mask=is_row, other=0) - begin
        b = tl.load(control + 2 * control_stride + i, mask=is_row, other=-1)
        is_live = (b >= 0) & (n > 0)
        row_splits = tl.where(is_row, 1, 0)
        row_low = 0 * i
        row_high = 0 * i
        if SPLIT > 0:
            position = tl.load(control + 6 * control_stride + i, mask=is_row, other=0)
            if BLOCKS is None:
                keys = tl.maximum(position + n, 0)
                start = position
                if DENSE:
                    start = position * 0
                b = tl.where(is_live, b, 0)[:, None]
                found, end = find_range(
                    parameters, b, start[:, None], (start + n - 1)[:, None], keys[:, None], HQ, SPEC
                )
                row_low = tl.where(is_live, tl.sum(found, 1), 0)
                row_high = tl.where(is_live, tl.maximum(tl.sum(end, 1), row_low), 0)
                row_splits = tl.maximum((row_high + SPLIT - 1) // SPLIT - row_low // SPLIT, 1)
            else:
                line = tl.where(is_live, b, 0) if BLOCKS[0] > 1 else 0 * b
                entries = tl.load(blocks + line.to(tl.int64) * BLOCKS[1], mask=is_live, other=0)
                row_splits = tl.maximum((entries + SPLIT - 1) // SPLIT, 1)
        count = (n + TOKENS - 1) // TOKENS * row_splits * HEADS
        passed = tl.sum((tl.cumsum(count, 0) <= item - before).to(tl.int32), 0)
        here = tl.sum(count, 0)
        is_mine = i - first == passed
        is_here = (item >= before) & (item < before + here)
        if is_here:
            row = first + passed
            base = before + tl.sum(tl.where(i - first < passed, count, 0), 0)
            splits = tl.sum(tl.where(is_mine, row_splits, 0), 0)
            low = tl.sum(tl.where(is_mine, row_low, 0), 0)
            high = tl.sum(tl.where(is_mine, row_high, 0), 0)
        before += here
    return row, base, splits, low, high, before
