"""The first half of LoRA in Triton: x A^T of each tile of tokens, its inputs split among programs.

    partials[split, tile, token, slice, r] = sum of x[token, k] A[slot, slice, r, k] over the inputs k of the split

fp32, without atomics: who reads the partials adds them up in one order. A program reads an adapter's weights once per
tile, as many rows of them as the adapter has ranks.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from deltaline_kernels.lora.plan import ShrinkPlan
from deltaline_kernels.lora.tile import drop_empty, load_rank, load_tile, shrink_tile
from deltaline_kernels.lora.tiles import AdapterTiles


# One compiled variant whatever tiles a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_tiles", "tile_stride"], do_not_specialize_on_alignment=["tile_slots", "tile_tokens"]
)
def _shrink(
    x,
    a,
    ranks,
    partials,
    tile_slots,
    tile_tokens,
    x_stride,
    num_tiles,
    tile_stride,
    K: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr,
    STEPS: tl.constexpr,
    EAGER_ROWS: tl.constexpr,
    DEPENDENTS: tl.constexpr,
):
    if DEPENDENTS:
        # The expand may start, load its weights and wait.
        gdc_launch_dependents()
    i_split = tl.program_id(0) % SPLITS
    i_slice = tl.program_id(0) // SPLITS % S
    tile = tl.program_id(0) // (SPLITS * S)
    o_m = tl.arange(0, BLOCK_M)
    o_r = tl.arange(0, BLOCK_R)
    slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, PIECES)
    # Tiles of adapters come first: behind the first one without an adapter there are none.
    while slot >= 0:
        rank = drop_empty(load_rank(ranks, slot, i_slice, S, R), tile_tokens, tile, BLOCK_M, PIECES)
        p_a = a + (slot.to(tl.int64) * S + i_slice) * (R * K)
        row = (i_split * num_tiles + tile).to(tl.int64) * BLOCK_M + o_m
        p_s = partials + row[:, None] * (S * COLUMNS) + i_slice * COLUMNS + o_r[None, :]
        first_k = i_split * (STEPS * BLOCK_K)
        in_row = (token >= 0)[:, None]
        # Not a part of the loop, whose end has to be known before it begins.
        s = shrink_tile(
            x, p_a, token, x_stride, first_k, 0, rank, K, BLOCK_M, BLOCK_R, BLOCK_K, WAYS, STEPS, EAGER_ROWS
        )
        tl.store(p_s, s, mask=in_row & (o_r < COLUMNS)[None, :])
        if BLOCK_R < R:
            for r in range(BLOCK_R, rank, BLOCK_R):
                s = shrink_tile(x, p_a, token, x_stride, first_k, r, rank, K, BLOCK_M, BLOCK_R, BLOCK_K, WAYS, STEPS, 0)
                tl.store(p_s + r, s, mask=in_row & (r + o_r < COLUMNS)[None, :])
        tile += tile_stride
        slot, token = load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M, PIECES)


def launch_shrink(
    x: Tensor,
    a: Tensor,
    ranks: Tensor | None,
    partials: Tensor,
    tiles: AdapterTiles,
    plan: ShrinkPlan,
    *,
    dependents: bool,
) -> None:
    """Write partials `[splits, tiles, rows, S, columns]`, where a tile has a token and its adapter a rank.

    a: `[slots, S, R, in]`. Arguments are validated by the caller. `dependents`: the next launch waits by itself.
    """
    _, num_slices, max_rank, num_inputs = a.shape
    num_tiles = tiles.num_tiles * (tiles.rows // plan.block_m)
    per_tile = plan.splits * num_slices
    tiles_at_once = min(num_tiles, max(1, plan.programs // per_tile))
    _shrink[(tiles_at_once * per_tile,)](
        x,
        a,
        ranks,
        partials,
        tiles.slots,
        tiles.tokens,
        x.stride(0),
        num_tiles,
        tiles_at_once,
        K=num_inputs,
        R=max_rank,
        S=num_slices,
        COLUMNS=partials.shape[4],
        SPLITS=plan.splits,
        DEPENDENTS=dependents,
        **plan.options(tiles.rows),
    )
