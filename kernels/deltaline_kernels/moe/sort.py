"""Sorts the choices of tokens by expert, stably, on the device: in three launches, two of them over blocks of choices.

A block counts its choices of every expert; then each count becomes that of the blocks before; and a block knows where
its choices go. Beside that come the tiles of rows of one expert. Choices one behind the other are called pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.sizes import cdiv, count_tiles, pow2

# Pairs of a block, and so many at once where each is compared with each. On an H200 blocks of 128 take 22 us for 8,192
# tokens of 8 choices, of 1,024 27.
BLOCK_PAIRS, COMPARED = 128, 128
# Experts of a program that adds up, and blocks that it looks at at once.
BLOCK_COLUMNS, BLOCK_ROWS = 16, 256
# Tiles that a program lists.
LISTED = 16


@dataclass(frozen=True)
class Sorted:
    """Choices `[T, C]` in the order of their experts.

    Args:
        places: `[T * C]` int32, where each choice lies; -1 for one without an expert. tokens: `[T * C]` int32, of each
            place; not written behind the last one.
        tiles: `[tiles, 3]` int32, of each tile its expert, its first place and the end of that expert's places; the
            expert is -1 behind the last tile. num_tiles: `[1]` int32, how many there are.
    """

    places: Tensor
    tokens: Tensor
    tiles: Tensor
    num_tiles: Tensor


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_pairs", "num_experts"], do_not_specialize_on_alignment=["experts"])
def _count(experts, counts, num_pairs, num_experts, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write how many pairs of each expert a block has."""
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
    is_used = (expert >= 0) & (expert < num_experts)
    counted = tl.histogram(tl.where(is_used, expert, 0), BLOCK_E, mask=is_used)
    tl.store(counts + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), counted)


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_blocks"])
def _add_up(counts, totals, num_blocks, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Turn the counts of a few experts into those of the blocks before, and write their totals."""
    o_e = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    before = tl.zeros((BLOCK_C,), tl.int32)
    for begin in range(0, num_blocks, BLOCK_R):
        o_b = begin + tl.arange(0, BLOCK_R)
        p_counts = counts + o_b[:, None] * BLOCK_E + o_e[None, :]
        some = tl.load(p_counts, mask=(o_b < num_blocks)[:, None], other=0)
        tl.store(p_counts, before[None, :] + tl.cumsum(some, axis=0) - some, mask=(o_b < num_blocks)[:, None])
        before += tl.sum(some, axis=0)
    tl.store(totals + o_e, before)


@triton.jit
def _place_block(
    experts,
    places,
    tokens,
    first,
    begin,
    num_pairs,
    num_experts,
    C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Write the places of a block's pairs and the tokens of these places; `first`: where those of each expert begin."""
    o_p = tl.arange(0, COMPARED)
    for i in range(0, BLOCK_P, COMPARED):
        pair = begin + i + o_p
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        is_used = (expert >= 0) & (expert < num_experts)
        known = tl.where(is_used, expert, 0)
        # Summed over the first dimension, most of which is in a thread.
        same = (expert[:, None] == expert[None, :]) & (o_p[:, None] < o_p[None, :])
        place = tl.gather(first, known, 0) + tl.sum(same.to(tl.int32), axis=0)
        tl.store(places + pair, tl.where(is_used, place, -1), mask=pair < num_pairs)
        tl.store(tokens + place, pair // C, mask=is_used)
        first += tl.histogram(known, BLOCK_E, mask=is_used)


@triton.jit
def _list_tiles(tiles, num_tiles, total, end, part, ROWS: tl.constexpr, LISTED: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write LISTED tiles, and the first part how many there are."""
    o_e = tl.arange(0, BLOCK_E)
    count = (total + ROWS - 1) // ROWS
    last = tl.cumsum(count, axis=0)
    o_l = part * LISTED + tl.arange(0, LISTED)
    expert = tl.sum((last[None, :] <= o_l[:, None]).to(tl.int32), axis=1)
    mine = expert[:, None] == o_e[None, :]
    begin = tl.sum(tl.where(mine, (end - total - (last - count) * ROWS)[None, :], 0), axis=1) + o_l * ROWS
    stop = tl.sum(tl.where(mine, end[None, :], 0), axis=1)
    tl.store(tiles + o_l * 3, tl.where(expert < BLOCK_E, expert, -1))
    tl.store(tiles + o_l * 3 + 1, begin)
    tl.store(tiles + o_l * 3 + 2, stop)
    tl.store(num_tiles, tl.sum(count, axis=0), mask=part == 0)


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_blocks"], do_not_specialize_on_alignment=["experts"])
def _place(
    experts,
    counts,
    totals,
    places,
    tokens,
    tiles,
    num_tiles,
    num_pairs,
    num_experts,
    num_blocks,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Write the places of a block of pairs; the programs behind list tiles."""
    o_e = tl.arange(0, BLOCK_E)
    total = tl.load(totals + o_e)
    end = tl.cumsum(total, axis=0)
    block = tl.program_id(0)
    if block < num_blocks:
        first = end - total + tl.load(counts + block * BLOCK_E + o_e)
        begin = block * BLOCK_P
        _place_block(experts, places, tokens, first, begin, num_pairs, num_experts, C, BLOCK_P, BLOCK_E, COMPARED)
    else:
        _list_tiles(tiles, num_tiles, total, end, block - num_blocks, ROWS, LISTED, BLOCK_E)


def sort_choices(experts: Tensor, num_experts: int, rows: int) -> Sorted:
    """Sort the choices `[T, C]` int32; tiles of `rows`. Choices outside 0..num_experts-1 have no place."""
    num_pairs, choices = experts.numel(), experts.shape[1]
    block_e = max(16, pow2(num_experts))
    num_blocks = cdiv(num_pairs, BLOCK_PAIRS)
    listing = cdiv(count_tiles(num_pairs, num_experts, rows), LISTED)
    counts, totals = experts.new_empty(num_blocks, block_e), experts.new_empty(block_e)
    made = Sorted(
        experts.new_empty(num_pairs),
        experts.new_empty(num_pairs),
        experts.new_empty(listing * LISTED, 3),
        experts.new_empty(1),
    )
    blocks = {"BLOCK_P": BLOCK_PAIRS, "BLOCK_E": block_e}
    _count[(num_blocks,)](experts, counts, num_pairs, num_experts, **blocks, num_warps=4)
    _add_up[(block_e // BLOCK_COLUMNS,)](
        counts, totals, num_blocks, BLOCK_E=block_e, BLOCK_R=BLOCK_ROWS, BLOCK_C=BLOCK_COLUMNS, num_warps=8
    )
    _place[(num_blocks + listing,)](
        experts,
        counts,
        totals,
        made.places,
        made.tokens,
        made.tiles,
        made.num_tiles,
        num_pairs,
        num_experts,
        num_blocks,
        C=choices,
        ROWS=rows,
        LISTED=LISTED,
        **blocks,
        COMPARED=COMPARED,
        num_warps=4,
    )
    return made
