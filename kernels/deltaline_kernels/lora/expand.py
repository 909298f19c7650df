"""The second half of LoRA in Triton: adds up the partial sums of a tile, multiplies them by B, adds to the outputs.

    out[token, n] = factor[slot, n] (out[token, n] + scale[slot, slice] sum over r of s[token, slice, r] B[slot, r, n])

A program has some blocks of outputs of one slice, for some tiles. With one block it loads weights and outputs before it
waits for the sums.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from deltaline_kernels.lora.plan import ExpandPlan, expand_options
from deltaline_kernels.lora.tile import (
    RANK_UNIT,
    drop_empty,
    expand_tile,
    find_block,
    load_factor,
    load_rank,
    load_scale,
    load_sums,
    load_tile,
)
from deltaline_kernels.lora.tiles import AdapterTiles
from deltaline_kernels.lora.weights import OutputWeights


# One compiled variant whatever tiles a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_tiles", "tile_stride"], do_not_specialize_on_alignment=["tile_slots", "tile_tokens"]
)
def _expand(
    sums,
    b,
    ranks,
    scales,
    factors,
    out,
    tile_slots,
    tile_tokens,
    row_stride,
    b_slot_stride,
    out_stride,
    num_tiles,
    tile_stride,
    N: tl.constexpr,
    R: tl.constexpr,
    SIZES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE_UNITS: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    OUTPUT_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    S: tl.constexpr = len(SIZES)
    # Sums of all ranks fit: they are loaded once for all blocks of outputs.
    ONCE: tl.constexpr = BLOCK_R >= R
    i_slice, first, end = find_block(tl.program_id(0) % PARTS, SIZES, STEPS * BLOCK_N)
    tile = tl.program_id(0) // PARTS
    split_stride = num_tiles.to(tl.int64) * BLOCK_M * row_stride
    o_m = tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, BLOCK_R)
    slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, PIECES)
    # Tiles of adapters come first: behind the first one without an adapter there are none.
    while slot >= 0:
        rank = drop_empty(load_rank(ranks, slot, i_slice, S, R), tile_tokens, tile, BLOCK_M, PIECES)
        scale = load_scale(scales, slot, i_slice, S)
        in_row = (token >= 0) & (rank > 0)
        if BY_TOKEN:
            o_row = token.to(tl.int64) * row_stride
        else:
            o_row = (tile.to(tl.int64) * BLOCK_M + o_m) * row_stride
        p_s = sums + i_slice * COLUMNS
        p_slot = b + slot.to(tl.int64) * b_slot_stride + o_r[:, None] * RANK_STRIDE
        p_token = out + token.to(tl.int64)[:, None] * out_stride
        if ONCE and STEPS > 1:
            if DEPENDENT:
                gdc_wait()
            s = load_sums(p_s, o_row, in_row, 0, rank, split_stride, COLUMNS, WHOLE_UNITS, SPLITS, BLOCK_R)
        for i in range(0, STEPS):
            o_n = first + i * BLOCK_N + tl.arange(0, BLOCK_N)
            in_n = (o_n < end)[None, :]
            inside = in_row[:, None] & in_n
            if ADD:
                b_out = tl.load(p_token + o_n[None, :], mask=inside, other=0.0)
            else:
                b_out = tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty)
            factor = load_factor(factors, slot, o_n, end, N)
            p_b = p_slot + o_n[None, :] * OUTPUT_STRIDE
            b_b = tl.load(p_b, mask=(o_r < rank)[:, None] & in_n, other=0.0)
            if not (ONCE and STEPS > 1):
                if DEPENDENT:
                    gdc_wait()
                s = load_sums(p_s, o_row, in_row, 0, rank, split_stride, COLUMNS, WHOLE_UNITS, SPLITS, BLOCK_R)
            product = expand_tile(s, b_b)
            if not ONCE:
                for r in range(BLOCK_R, rank, BLOCK_R):
                    p_b += BLOCK_R * RANK_STRIDE
                    b_b = tl.load(p_b, mask=(r + o_r < rank)[:, None] & in_n, other=0.0)
                    s = load_sums(p_s, o_row, in_row, r, rank, split_stride, COLUMNS, WHOLE_UNITS, SPLITS, BLOCK_R)
                    product += expand_tile(s, b_b)
            y = (b_out.to(tl.float32) + scale * product) * factor
            tl.store(p_token + o_n[None, :], y.to(out.dtype.element_ty), mask=inside)
        tile += tile_stride
        slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, PIECES)
    if DEPENDENT:
        # A program without a tile too: who waits for this launch waits for the shrink.
        gdc_wait()


def launch_expand(
    sums: Tensor,
    weights: OutputWeights,
    out: Tensor,
    tiles: AdapterTiles,
    plan: ExpandPlan,
    *,
    by_token: bool = False,
    add: bool = True,
    dependent: bool = False,
) -> None:
    """Add to out `[T, out]` what the sums give, or with `add` false overwrite it, for tokens that have an adapter.

    Args:
        sums: `[splits, tiles, rows, S, columns]` fp32; `by_token`: `[1, 1, T, S, columns]` of any dtype.
        dependent: the launch before this one is the shrink, and may still run when this one starts.

    Arguments are validated by the caller.
    """
    pieces = tiles.rows // plan.block_m
    num_tiles = tiles.num_tiles * pieces
    parts = sum(triton.cdiv(size, plan.steps * plan.block_n) for size in weights.sizes)
    tiles_at_once = min(num_tiles, max(1, plan.programs // parts))
    _expand[(tiles_at_once * parts,)](
        sums,
        *weights.arguments(out, tiles),
        sums.stride(2),
        weights.b.stride(0),
        out.stride(0),
        num_tiles,
        tiles_at_once,
        **weights.constants,
        COLUMNS=sums.shape[4],
        WHOLE_UNITS=sums.shape[4] % RANK_UNIT.value == 0,
        SPLITS=sums.shape[0],
        PARTS=parts,
        STEPS=plan.steps,
        BLOCK_M=plan.block_m,
        PIECES=pieces,
        BLOCK_R=plan.block_r,
        BLOCK_N=plan.block_n,
        BY_TOKEN=by_token,
        ADD=add,
        DEPENDENT=dependent,
        num_warps=plan.warps,
        num_stages=1,
        **expand_options(plan, dependent=dependent),
    )
