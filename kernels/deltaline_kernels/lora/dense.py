"""LoRA in Triton for tiles of many tokens whose adapters have high ranks: products of bf16 by whole warp groups.

The shrink leaves x A^T in two halves, its high part and what is left of it; so the expand takes both as they come.
That keeps every operand of a product in shared memory: an asynchronous product of Hopper whose operand is in registers
is what some assemblers get wrong. The inputs are not split: a tile of high rank has programs enough.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.lora.plan import DensePlan, expand_options
from deltaline_kernels.lora.tile import find_block, load_factor, load_rank, load_scale, load_tile, shrink_tile
from deltaline_kernels.lora.tiles import AdapterTiles
from deltaline_kernels.lora.weights import OutputWeights


# One compiled variant whatever tiles a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["scaling", "num_tiles", "tile_stride"],
    do_not_specialize_on_alignment=["tile_slots", "tile_tokens"],
)
def shrink_kernel(
    x,
    a,
    ranks,
    sums,
    tile_slots,
    tile_tokens,
    x_stride,
    scaling,
    num_tiles,
    tile_stride,
    K: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    DEPENDENTS: tl.constexpr,
):
    """Write x A^T of a tile of many tokens."""
    if DEPENDENTS:
        # The expand may start, load its outputs and wait.
        gdc_launch_dependents()
    r = tl.program_id(0) % BLOCKS * BLOCK_R
    i_slice = tl.program_id(0) // BLOCKS % S
    tile = tl.program_id(0) // (BLOCKS * S)
    o_m = tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, BLOCK_R)
    slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, 1)
    # Tiles of adapters come first: behind the first one without an adapter there are none.
    while slot >= 0:
        rank = load_rank(ranks, slot, i_slice, S, R)
        if r < rank:
            p_a = a + (slot.to(tl.int64) * S + i_slice) * (R * K)
            s = shrink_tile(x, p_a, token, x_stride, 0, r, rank, K, BLOCK_M, BLOCK_R, BLOCK_K, 1, STEPS, 0)
            if scaling is None:
                row = (tile.to(tl.int64) * BLOCK_M + o_m) * S + i_slice
                # Rows without a token too, as zeros: the expand loads whole tiles.
                store_halves(sums + (row * (2 * COLUMNS) + r)[:, None] + o_r[None, :], s, COLUMNS)
            else:
                row = token.to(tl.int64) * S + i_slice
                inside = (token >= 0)[:, None] & (r + o_r < R)[None, :]
                tl.store(sums + (row * R + r)[:, None] + o_r[None, :], s * scaling, mask=inside)
        tile += tile_stride
        slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, 1)


@triton.jit
def store_halves(p_high, s, COLUMNS: tl.constexpr):
    """Store fp32 sums as what of them fits in the dtype behind `p_high`, and what is left of them COLUMNS behind it."""
    dtype: tl.constexpr = p_high.dtype.element_ty
    high = s.to(dtype)
    tl.store(p_high, high)
    tl.store(p_high + COLUMNS, (s - high.to(tl.float32)).to(dtype))


# One compiled variant whatever tiles a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_tiles", "tile_stride"], do_not_specialize_on_alignment=["tile_slots", "tile_tokens"]
)
def expand_kernel(
    halves,
    b,
    ranks,
    scales,
    factors,
    out,
    tile_slots,
    tile_tokens,
    b_slot_stride,
    out_stride,
    num_tiles,
    tile_stride,
    N: tl.constexpr,
    R: tl.constexpr,
    SIZES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    OUTPUT_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Add s B^T of a tile of many tokens to a block of outputs."""
    S: tl.constexpr = len(SIZES)
    i_slice, column, end = find_block(tl.program_id(0) % PARTS, SIZES, BLOCK_N)
    tile = tl.program_id(0) // PARTS
    o_m = tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, BLOCK_R)
    o_n = column + tl.arange(0, BLOCK_N)
    in_n = (o_n < end)[None, :]
    slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, 1)
    # Tiles of adapters come first: behind the first one without an adapter there are none.
    while slot >= 0:
        rank = load_rank(ranks, slot, i_slice, S, R)
        scale = load_scale(scales, slot, i_slice, S)
        # Whatever the rank, which is known later.
        inside = (token >= 0)[:, None] & in_n
        p_out = out + token.to(tl.int64)[:, None] * out_stride + o_n[None, :]
        if ADD and EARLY:
            b_out = tl.load(p_out, mask=inside, other=0.0)
        if DEPENDENT:
            gdc_wait()
        row = tile.to(tl.int64) * BLOCK_M + o_m
        p_s = halves + ((row * S + i_slice) * (2 * COLUMNS))[:, None] + o_r[None, :]
        p_b = b + slot.to(tl.int64) * b_slot_stride + o_r[:, None] * RANK_STRIDE + o_n[None, :] * OUTPUT_STRIDE
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for r in range(0, rank, BLOCK_R):
            b_b = tl.load(p_b, mask=(r + o_r < rank)[:, None] & in_n, other=0.0)
            product = tl.dot(tl.load(p_s), b_b, product)
            product = tl.dot(tl.load(p_s + COLUMNS), b_b, product)
            p_s += BLOCK_R
            p_b += BLOCK_R * RANK_STRIDE
        if ADD and not EARLY:
            b_out = tl.load(p_out, mask=inside, other=0.0)
        elif not ADD:
            b_out = tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty)
        y = b_out.to(tl.float32) + scale * product
        # Late: what is held meanwhile takes registers from the products.
        y *= load_factor(factors, slot, o_n, end, N)
        tl.store(p_out, y.to(out.dtype.element_ty), mask=inside & (rank > 0))
        tile += tile_stride
        slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, 1)
    if DEPENDENT:
        # A program without a tile too: who waits for this launch waits for the shrink.
        gdc_wait()


def empty_halves(tiles: AdapterTiles, num_slices: int, b: Tensor, plan: DensePlan) -> Tensor:
    """Return memory `[tiles, rows, S, 2, columns]` for the halves of sums that meet `b`."""
    size = (tiles.num_tiles, tiles.rows, num_slices, 2, plan.columns)
    return torch.empty(size, dtype=b.dtype, device=b.device)


def launch_shrink_dense(
    x: Tensor,
    a: Tensor,
    ranks: Tensor | None,
    sums: Tensor,
    tiles: AdapterTiles,
    plan: DensePlan,
    *,
    scaling: float | None = None,
    dependents: bool = False,
) -> None:
    """Write x A^T as halves `[tiles, rows, S, 2, columns]`, of tokens that have an adapter with a rank.

    a: `[slots, S, R, in]`. `scaling`: the sums are written scaled and whole, in fp32, to `[T, S, R]`. `dependents`: the
    next launch waits by itself. Arguments are validated by the caller.
    """
    _, num_slices, rank, inputs = a.shape
    blocks = triton.cdiv(rank, plan.shrink_r)
    per_tile = blocks * num_slices
    tiles_at_once = min(tiles.num_tiles, max(1, plan.programs // per_tile))
    shrink_kernel[(tiles_at_once * per_tile,)](
        x,
        a,
        ranks,
        sums,
        tiles.slots,
        tiles.tokens,
        x.stride(0),
        scaling,
        tiles.num_tiles,
        tiles_at_once,
        K=inputs,
        R=rank,
        S=num_slices,
        COLUMNS=plan.columns,
        BLOCKS=blocks,
        BLOCK_M=tiles.rows,
        BLOCK_R=plan.shrink_r,
        BLOCK_K=plan.shrink_k,
        STEPS=plan.shrink_steps,
        DEPENDENTS=dependents,
        num_warps=plan.shrink_warps,
        num_stages=plan.shrink_stages,
    )


def launch_expand_dense(
    halves: Tensor,
    weights: OutputWeights,
    out: Tensor,
    tiles: AdapterTiles,
    plan: DensePlan,
    *,
    add: bool = True,
    dependent: bool = False,
) -> None:
    """Add to out `[T, out]` what the halves `[tiles, rows, S, 2, columns]` give, or with `add` false overwrite it.

    Other arguments: see `launch_expand`. They are validated by the caller.
    """
    parts = sum(triton.cdiv(size, plan.expand_n) for size in weights.sizes)
    tiles_at_once = min(tiles.num_tiles, max(1, plan.programs // parts))
    expand_kernel[(tiles_at_once * parts,)](
        halves,
        *weights.arguments(out, tiles),
        weights.b.stride(0),
        out.stride(0),
        tiles.num_tiles,
        tiles_at_once,
        **weights.constants,
        COLUMNS=plan.columns,
        PARTS=parts,
        BLOCK_M=tiles.rows,
        BLOCK_R=plan.expand_r,
        BLOCK_N=plan.expand_n,
        EARLY=plan.early,
        ADD=add,
        DEPENDENT=dependent,
        num_warps=plan.expand_warps,
        num_stages=plan.expand_stages,
        **expand_options(plan, dependent=dependent),
    )
