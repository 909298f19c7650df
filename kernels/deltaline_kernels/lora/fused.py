"""Both halves of LoRA in one launch, for batches of few tokens: each program computes the sums that it needs itself.

What it costs is an adapter's A once per block of outputs instead of once, most of it from the cache; what it saves is a
launch and the way of the sums through memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.lora.plan import FusedPlan
from deltaline_kernels.lora.tile import (
    drop_empty,
    expand_tile,
    find_block,
    load_factor,
    load_rank,
    load_scale,
    load_tile,
    shrink_tile,
)
from deltaline_kernels.lora.tiles import AdapterTiles
from deltaline_kernels.lora.weights import LoraWeights


@triton.jit
def _pin(b):
    """Return b; what is done with it is not done before: the compiler would wait for b as soon as it is loaded."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b], dtype=b.dtype, is_pure=False, pack=2)


# One compiled variant whatever tiles a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_tiles", "tile_stride"], do_not_specialize_on_alignment=["tile_slots", "tile_tokens"]
)
def _fused(
    x,
    a,
    b,
    ranks,
    scales,
    factors,
    out,
    tile_slots,
    tile_tokens,
    x_stride,
    out_stride,
    num_tiles,
    tile_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr,
    STEPS: tl.constexpr,
    EAGER_ROWS: tl.constexpr,
    PIN: tl.constexpr,
):
    S: tl.constexpr = len(SIZES)
    i_slice, column, end = find_block(tl.program_id(0) % BLOCKS, SIZES, BLOCK_N)
    tile = tl.program_id(0) // BLOCKS
    o_r = tl.arange(0, BLOCK_R)
    o_n = column + tl.arange(0, BLOCK_N)
    slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, PIECES)
    # Tiles of adapters come first: behind the first one without an adapter there are none.
    while slot >= 0:
        rank = drop_empty(load_rank(ranks, slot, i_slice, S, R), tile_tokens, tile, BLOCK_M, PIECES)
        scale = load_scale(scales, slot, i_slice, S)
        p_a = a + (slot.to(tl.int64) * S + i_slice) * (R * K)
        p_b = b + slot.to(tl.int64) * (R * N) + o_r[:, None] * N + o_n[None, :]
        inside = (token >= 0)[:, None] & (o_n < end)[None, :]
        p_out = out + token.to(tl.int64)[:, None] * out_stride + o_n[None, :]
        # On their way while the sums are computed, and before the rank is known.
        b_out = tl.load(p_out, mask=inside, other=0.0)
        factor = load_factor(factors, slot, o_n, end, N)
        in_b = ((o_r < rank) | (o_r < EAGER_ROWS))[:, None] & (o_n < end)[None, :]
        b_b = tl.load(p_b, mask=in_b, other=0.0)
        s = shrink_tile(x, p_a, token, x_stride, 0, 0, rank, K, BLOCK_M, BLOCK_R, BLOCK_K, WAYS, STEPS, EAGER_ROWS)
        if PIN:
            b_b = _pin(b_b)
        product = expand_tile(s, tl.where((o_r < rank)[:, None], b_b, 0.0))
        if BLOCK_R < R:
            for r in range(BLOCK_R, rank, BLOCK_R):
                p_b += BLOCK_R * N
                b_b = tl.load(p_b, mask=(r + o_r < rank)[:, None] & (o_n < end)[None, :], other=0.0)
                s = shrink_tile(x, p_a, token, x_stride, 0, r, rank, K, BLOCK_M, BLOCK_R, BLOCK_K, WAYS, STEPS, 0)
                product += expand_tile(s, b_b)
        y = (b_out.to(tl.float32) + scale * product) * factor
        tl.store(p_out, y.to(out.dtype.element_ty), mask=inside & (rank > 0))
        tile += tile_stride
        slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, PIECES)


def launch_fused(x: Tensor, out: Tensor, weights: LoraWeights, tiles: AdapterTiles, plan: FusedPlan) -> None:
    """Add to out `[T, out]` for tokens that have an adapter; arguments are validated by the caller."""
    num_tiles = tiles.num_tiles * (tiles.rows // plan.block_m)
    blocks = sum(triton.cdiv(size, plan.block_n) for size in weights.sizes)
    tiles_at_once = min(num_tiles, max(1, plan.programs // blocks))
    _fused[(tiles_at_once * blocks,)](
        x,
        weights.a,
        *weights.of_outputs.arguments(out, tiles),
        x.stride(0),
        out.stride(0),
        num_tiles,
        tiles_at_once,
        K=weights.num_inputs,
        N=weights.num_outputs,
        R=weights.max_rank,
        SIZES=weights.sizes,
        BLOCKS=blocks,
        BLOCK_N=plan.block_n,
        PIN=x.device.type != "cpu",
        **plan.options(tiles.rows),
    )
