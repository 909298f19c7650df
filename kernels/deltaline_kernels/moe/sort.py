"""Sorts the choices of tokens by expert, stably, on the device: in three launches, each over blocks of tokens.

A block counts its choices of every expert; then each count becomes that of the blocks before; and a block knows where
its choices go. Beside that come the tiles of rows of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.sizes import cdiv, count_tiles, pow2

# Tokens times experts of a program, experts of one that adds up, and blocks that it looks at at once.
BLOCK_VALUES, BLOCK_COLUMNS, BLOCK_ROWS = 8192, 32, 256
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
@triton.jit(do_not_specialize=["num_tokens", "num_experts"], do_not_specialize_on_alignment=["experts"])
def _count(experts, counts, num_tokens, num_experts, C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write how many choices of each expert a block of tokens has."""
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)
    own = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
    for c in range(C):
        expert = tl.load(experts + o_t * C + c, mask=o_t < num_tokens, other=-1)
        own += (expert[:, None] == o_e[None, :]).to(tl.int32)
    counted = tl.where(o_e < num_experts, tl.sum(own, axis=0), 0)
    tl.store(counts + tl.program_id(0) * BLOCK_E + o_e, counted)


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
    counts,
    places,
    tokens,
    total,
    end,
    block,
    num_tokens,
    num_experts,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the places of a block of tokens, and the tokens of these places."""
    o_e = tl.arange(0, BLOCK_E)
    o_t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    in_t = o_t < num_tokens
    own = tl.zeros((BLOCK_T, BLOCK_E), tl.int32)
    for c in range(C):
        expert = tl.load(experts + o_t * C + c, mask=in_t, other=-1)
        own += (expert[:, None] == o_e[None, :]).to(tl.int32)
    first = end - total + tl.load(counts + block * BLOCK_E + o_e)
    place = first[None, :] + tl.cumsum(own, axis=0) - own
    for c in range(C):
        pair = o_t * C + c
        expert = tl.load(experts + pair, mask=in_t, other=-1)
        is_used = (expert >= 0) & (expert < num_experts)
        tl.store(places + pair, -1, mask=in_t & (is_used == 0))
        mine = (expert[:, None] == o_e[None, :]) & (is_used & in_t)[:, None]
        tl.store(places + pair[:, None] + tl.zeros((1, BLOCK_E), tl.int32), place, mask=mine)
        tl.store(tokens + place, o_t[:, None] + tl.zeros((1, BLOCK_E), tl.int32), mask=mine)
        # A token may have an expert twice.
        place += mine.to(tl.int32)


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
@triton.jit(do_not_specialize=["num_tokens", "num_experts", "num_blocks"], do_not_specialize_on_alignment=["experts"])
def _place(
    experts,
    counts,
    totals,
    places,
    tokens,
    tiles,
    num_tiles,
    num_tokens,
    num_experts,
    num_blocks,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write the places of a block of tokens; the programs behind list tiles."""
    total = tl.load(totals + tl.arange(0, BLOCK_E))
    end = tl.cumsum(total, axis=0)
    block = tl.program_id(0)
    if block < num_blocks:
        _place_block(experts, counts, places, tokens, total, end, block, num_tokens, num_experts, C, BLOCK_T, BLOCK_E)
    else:
        _list_tiles(tiles, num_tiles, total, end, block - num_blocks, ROWS, LISTED, BLOCK_E)


def sort_choices(experts: Tensor, num_experts: int, rows: int) -> Sorted:
    """Sort the choices `[T, C]` int32; tiles of `rows`. Choices outside 0..num_experts-1 have no place."""
    num_tokens, choices = experts.shape
    num_pairs, block_e = num_tokens * choices, pow2(num_experts)
    block_t = max(1, min(pow2(num_tokens), BLOCK_VALUES // block_e))
    columns = min(BLOCK_COLUMNS, block_e)
    num_blocks = cdiv(num_tokens, block_t)
    listing = cdiv(count_tiles(num_pairs, num_experts, rows), LISTED)
    counts, totals = experts.new_empty(num_blocks, block_e), experts.new_empty(block_e)
    made = Sorted(
        experts.new_empty(num_pairs),
        experts.new_empty(num_pairs),
        experts.new_empty(listing * LISTED, 3),
        experts.new_empty(1),
    )
    blocks = {"BLOCK_T": block_t, "BLOCK_E": block_e}
    _count[(num_blocks,)](experts, counts, num_tokens, num_experts, C=choices, **blocks, num_warps=8)
    _add_up[(block_e // columns,)](
        counts, totals, num_blocks, BLOCK_E=block_e, BLOCK_R=BLOCK_ROWS, BLOCK_C=columns, num_warps=8
    )
    _place[(num_blocks + listing,)](
        experts,
        counts,
        totals,
        made.places,
        made.tokens,
        made.tiles,
        made.num_tiles,
        num_tokens,
        num_experts,
        num_blocks,
        C=choices,
        ROWS=rows,
        LISTED=LISTED,
        **blocks,
        num_warps=8,
    )
    return made
