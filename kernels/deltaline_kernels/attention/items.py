"""The items of work of an attention: which row, tile of queries, heads and split of the keys is the i-th one.

An item is counted only for splits that hold a live key. Those of one tile and its heads follow each other, so that a
program can take several of them in one go. Nothing is kept in memory: a program counts the items of all rows from
their positions and lengths, which is less work than to wait for a kernel that does so.
"""

import triton
import triton.language as tl

from deltaline_kernels.attention.modifiers.modify import find_range


@triton.jit
def count_rows(
    i,
    control,
    control_stride,
    num_rows,
    parameters,
    blocks,
    HQ: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Return of the rows i: how many items they have, how many splits, and where their live keys begin and end.

    Args:
        HEADS: groups of heads that are an item each. TOKENS: of a tile.
        SPLIT: keys, or entries of lists of blocks, of a split; 0: the keys are not split, and no live keys are found.
        BLOCKS: the shape of `blocks`, or None.
    """
    is_row = i < num_rows
    begin = tl.load(control + i, mask=is_row, other=0)
    n = tl.load(control + i + 1, mask=is_row, other=0) - begin
    b = tl.load(control + 2 * control_stride + i, mask=is_row, other=-1)
    is_live = (b >= 0) & (n > 0)
    splits = tl.where(is_row, 1, 0)
    low = 0 * i
    high = 0 * i
    if SPLIT > 0:
        position = tl.load(control + 6 * control_stride + i, mask=is_row, other=0)
        if BLOCKS is None:
            keys = tl.maximum(position + n, 0)
            start = position
            if DENSE:
                start = position * 0
            b = tl.where(is_live, b, 0)[:, None]
            found, end = find_range(parameters, b, start[:, None], (start + n - 1)[:, None], keys[:, None], HQ, SPEC)
            low = tl.where(is_live, tl.sum(found, 1), 0)
            high = tl.where(is_live, tl.maximum(tl.sum(end, 1), low), 0)
            splits = tl.maximum((high + SPLIT - 1) // SPLIT - low // SPLIT, 1)
        else:
            line = tl.where(is_live, b, 0) if BLOCKS[0] > 1 else 0 * b
            entries = tl.load(blocks + line.to(tl.int64) * BLOCKS[1], mask=is_live, other=0)
            splits = tl.maximum((entries + SPLIT - 1) // SPLIT, 1)
    return (n + TOKENS - 1) // TOKENS * splits * HEADS, splits, low, high


@triton.jit
def count_items(
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
    """Return how many items the first num_rows rows have; ROWS of them are looked at at once."""
    total = num_rows * 0
    for first in range(0, num_rows, ROWS):
        i = first + tl.arange(0, ROWS)
        count, _, _, _ = count_rows(
            i, control, control_stride, num_rows, parameters, blocks, HQ, HEADS, TOKENS, SPLIT, DENSE, BLOCKS, SPEC
        )
        total += tl.sum(count, 0)
    return total


@triton.jit
def pick(o_r, item, count, row_splits, row_low, row_high):
    """Return of item `item` of the rows o_r, 0 and on, that `count_rows` counted: its row, the row's first item and
    splits, live keys."""
    row = tl.sum((tl.cumsum(count, 0) <= item).to(tl.int32), 0)
    is_mine = o_r == row
    base = tl.sum(tl.where(o_r < row, count, 0), 0)
    splits = tl.sum(tl.where(is_mine, row_splits, 0), 0)
    low = tl.sum(tl.where(is_mine, row_low, 0), 0)
    high = tl.sum(tl.where(is_mine, row_high, 0), 0)
    return row, base, splits, low, high


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
    """Return of item `item` of all rows what `pick` does; ROWS of them are looked at at once."""
    before = item * 0
    row = item * 0
    base = item * 0
    splits = item * 0
    low = item * 0
    high = item * 0
    for first in range(0, num_rows, ROWS):
        i = first + tl.arange(0, ROWS)
        count, row_splits, row_low, row_high = count_rows(
            i, control, control_stride, num_rows, parameters, blocks, HQ, HEADS, TOKENS, SPLIT, DENSE, BLOCKS, SPEC
        )
        here = tl.sum(count, 0)
        if (item >= before) & (item < before + here):
            row, base, splits, low, high = pick(i - first, item - before, count, row_splits, row_low, row_high)
            row += first
            base += before
        before += here
    return row, base, splits, low, high


@triton.jit
def find_splits(
    row,
    control,
    control_stride,
    num_rows,
    parameters,
    blocks,
    HQ: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Return how many splits a row has. Looks at no other row."""
    i = row + tl.arange(0, 1)
    _, splits, _, _ = count_rows(
        i, control, control_stride, num_rows, parameters, blocks, HQ, HEADS, TOKENS, SPLIT, DENSE, BLOCKS, SPEC
    )
    return tl.sum(splits, 0)
