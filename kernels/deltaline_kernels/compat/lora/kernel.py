"""Turns what engines tell about adapters into tiles, and partial sums into what they expect of a shrink.

One launch each, without the host.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.lora.dense import store_halves
from deltaline_kernels.lora.plan import RANK_UNIT
from deltaline_kernels.lora.tile import load_sums
from deltaline_kernels.lora.tiles import AdapterTiles

# Tokens listed, or tiles marked, at once.
BLOCK = 256
# Sums of a token split at once.
SPLIT_COLUMNS = 32


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_tokens", "num_ids", "num_slots", "num_tiles"],
    do_not_specialize_on_alignment=["order", "counts", "starts", "ids", "tile_slots", "tile_tokens"],
)
def _list_tiles(
    order,
    counts,
    starts,
    ids,
    tile_slots,
    tile_tokens,
    num_tokens,
    num_ids,
    num_slots,
    num_tiles,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_id = tl.program_id(0)
    o_i = tl.arange(0, BLOCK_I)
    o_b = tl.arange(0, BLOCK)
    slots = tl.load(ids + o_i, mask=o_i < num_ids, other=-1)
    sizes = tl.load(counts + o_i, mask=o_i < num_ids, other=0)
    sizes = tl.where((slots >= 0) & (slots < num_slots), tl.maximum(sizes, 0), 0)
    first = tl.sum(tl.where(o_i < i_id, (sizes + ROWS - 1) // ROWS, 0))
    size = tl.sum(tl.where(o_i == i_id, sizes, 0))
    if i_id == num_ids:
        for begin in range(first, num_tiles, BLOCK):
            tl.store(tile_slots + begin + o_b, -1, mask=begin + o_b < num_tiles)
    elif size > 0:
        slot = tl.load(ids + i_id)
        start = tl.load(starts + i_id)
        num_own = (size + ROWS - 1) // ROWS
        for begin in range(0, num_own, BLOCK):
            o_tile = first + begin + o_b
            tl.store(tile_slots + o_tile, slot, mask=(begin + o_b < num_own) & (o_tile < num_tiles))
        for begin in range(0, num_own * ROWS, BLOCK):
            o_t = begin + o_b
            inside = (o_t < size) & (start + o_t >= 0) & (start + o_t < num_tokens)
            token = tl.load(order + start + o_t, mask=inside, other=-1)
            token = tl.where(token < num_tokens, token, -1)
            place = first.to(tl.int64) * ROWS + o_t
            tl.store(tile_tokens + place, token, mask=(o_t < num_own * ROWS) & (place < num_tiles.to(tl.int64) * ROWS))


def list_tiles(
    order: Tensor, counts: Tensor, starts: Tensor, ids: Tensor, num_ids: int, num_slots: int, tiles: AdapterTiles
) -> None:
    """Fill `tiles` with the tokens of the first `num_ids` of `ids`; those outside 0..num_slots-1 are left out."""
    num_tiles, rows = tiles.tokens.shape
    _list_tiles[(num_ids + 1,)](
        order,
        counts,
        starts,
        ids,
        tiles.slots,
        tiles.tokens,
        order.shape[0],
        num_ids,
        num_slots,
        num_tiles,
        ROWS=rows,
        BLOCK_I=max(16, triton.next_power_of_2(num_ids + 1)),
        BLOCK=BLOCK,
        num_warps=4,
        num_stages=1,
    )


# One compiled variant whatever tiles a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_tiles", "scaling"], do_not_specialize_on_alignment=["tile_slots", "tile_tokens"])
def _add_up(
    sums,
    out,
    tile_slots,
    tile_tokens,
    num_tiles,
    scaling,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tile = tl.program_id(0)
    o_m = tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, BLOCK_R)
    slot = tl.load(tile_slots + tile)
    token = tl.load(tile_tokens + tile.to(tl.int64) * BLOCK_M + o_m)
    in_row = (token >= 0) & (slot >= 0)
    o_row = (tile.to(tl.int64) * BLOCK_M + o_m) * COLUMNS
    split_stride = num_tiles.to(tl.int64) * (BLOCK_M * COLUMNS)
    for r in range(0, R, BLOCK_R):
        s = load_sums(sums, o_row, in_row, r, R, split_stride, COLUMNS, True, SPLITS, BLOCK_R)
        p_out = out + token.to(tl.int64)[:, None] * R + (r + o_r)[None, :]
        tl.store(p_out, s * scaling, mask=in_row[:, None] & (r + o_r < R)[None, :])


def add_up(sums: Tensor, out: Tensor, tiles: AdapterTiles, scaling: float) -> None:
    """Write scaling times the sums `[splits, tiles, rows, 1, columns]` to out `[T, R]`, contiguous, token by token."""
    num_tiles, rows = tiles.tokens.shape
    _add_up[(num_tiles,)](
        sums,
        out,
        tiles.slots,
        tiles.tokens,
        num_tiles,
        scaling,
        R=out.shape[1],
        COLUMNS=sums.shape[4],
        SPLITS=sums.shape[0],
        BLOCK_M=rows,
        BLOCK_R=RANK_UNIT,
        num_warps=4,
        num_stages=1,
    )


# One compiled variant whatever tiles a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize_on_alignment=["tile_slots", "tile_tokens"])
def _split_sums(
    sums,
    halves,
    tile_slots,
    tile_tokens,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tile = tl.program_id(0) // BLOCKS
    o_m = tl.arange(0, BLOCK_M)
    o_r = tl.program_id(0) % BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(tile_slots + tile)
    token = tl.load(tile_tokens + tile.to(tl.int64) * BLOCK_M + o_m)
    if slot >= 0:
        inside = (token >= 0)[:, None] & (o_r < R)[None, :]
        s = tl.load(sums + token.to(tl.int64)[:, None] * R + o_r[None, :], mask=inside, other=0.0).to(tl.float32)
        row = tile.to(tl.int64) * BLOCK_M + o_m
        store_halves(halves + (row * (2 * COLUMNS))[:, None] + o_r[None, :], s, COLUMNS)


def split_sums(sums: Tensor, halves: Tensor, tiles: AdapterTiles) -> None:
    """Write the sums `[T, R]`, contiguous, as halves `[tiles, rows, 1, 2, columns]`; zeros where a row has no token."""
    num_tiles, rows = tiles.tokens.shape
    columns = halves.shape[4]
    blocks = columns // SPLIT_COLUMNS
    _split_sums[(num_tiles * blocks,)](
        sums,
        halves,
        tiles.slots,
        tiles.tokens,
        R=sums.shape[1],
        COLUMNS=columns,
        BLOCKS=blocks,
        BLOCK_M=rows,
        BLOCK_R=SPLIT_COLUMNS,
        num_warps=4,
        num_stages=1,
    )
