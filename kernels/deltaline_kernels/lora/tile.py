"""What the LoRA kernels share: products of a tile of tokens with an adapter's weights, and where outputs are.

The kernels of a tile take 16 or 32 of its tokens at a time. So their products are those of single warps (mma.sync): the
asynchronous ones of Hopper, which take 64 rows and whose operands in registers some assemblers overwrite too early,
can't come up. Only those of dense.py take more, and have every operand in shared memory.
"""

import triton
import triton.language as tl

from deltaline_kernels.lora import plan

# Sums are read in whole units: behind an adapter's own rank they are zeros up to there.
RANK_UNIT = tl.constexpr(plan.RANK_UNIT)


@triton.jit
def find_block(i_block, SIZES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the slice of a block of outputs, its first column, and the end of the slice's columns."""
    i_slice, column, end = 0, i_block * BLOCK_N, SIZES[0]
    block, start = (SIZES[0] + BLOCK_N - 1) // BLOCK_N, SIZES[0]
    for j in tl.static_range(1, len(SIZES)):
        behind = i_block >= block
        i_slice = tl.where(behind, j, i_slice)
        column = tl.where(behind, start + (i_block - block) * BLOCK_N, column)
        end = tl.where(behind, start + SIZES[j], end)
        block += (SIZES[j] + BLOCK_N - 1) // BLOCK_N
        start += SIZES[j]
    return i_slice, column, end


@triton.jit
def load_tile(tile_slots, tile_tokens, tile, num_tiles, BLOCK_M: tl.constexpr, PIECES: tl.constexpr):
    """Return the slot of a tile and its tokens, at once; -1 for all behind the last tile.

    PIECES: of BLOCK_M tokens that each tile is taken in; `tile` and `num_tiles` count these.
    """
    inside = tile < num_tiles
    slot = tl.load(tile_slots + tile // PIECES, mask=inside, other=-1)
    p_token = tile_tokens + tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return slot, tl.load(p_token, mask=inside, other=-1)


@triton.jit
def load_rank(ranks, slot, i_slice, S: tl.constexpr, R: tl.constexpr):
    """Return the rank of an adapter in a slice: R where there are no `ranks`, and never above it."""
    if ranks is None:
        rank = tl.full((), R, tl.int32)
    else:
        rank = tl.minimum(tl.load(ranks + slot.to(tl.int64) * S + i_slice), R)
    return rank


@triton.jit
def drop_empty(rank, tile_tokens, tile, BLOCK_M: tl.constexpr, PIECES: tl.constexpr):
    """Return the rank, but 0 for a piece of a tile without tokens: nothing is read for it."""
    if PIECES > 1:
        rank = tl.where(tl.load(tile_tokens + tile.to(tl.int64) * BLOCK_M) >= 0, rank, 0)
    return rank


@triton.jit
def shrink_tile(
    x,
    p_a,
    token,
    x_stride,
    first_k,
    r,
    rank,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr,
    STEPS: tl.constexpr,
    EAGER_ROWS: tl.constexpr,
):
    """Return x A^T `[BLOCK_M, BLOCK_R]` fp32 of ranks r.. over STEPS blocks of inputs; zeros where rank ends.

    WAYS: parts of each block whose sums are apart until the end, so that as many warps share a product of few columns.
    EAGER_ROWS: so many rows of A are loaded before it is known whether rank ends before them.
    """
    o_r = r + tl.arange(0, BLOCK_R)
    in_rank = (o_r < rank) | (o_r < EAGER_ROWS)
    PART: tl.constexpr = BLOCK_K // WAYS
    p_x = x + token.to(tl.int64) * x_stride
    if WAYS == 1:
        s = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for i in range(0, STEPS):
            o_k = first_k + i * BLOCK_K + tl.arange(0, BLOCK_K)
            in_x = (token >= 0)[:, None] & (o_k < K)[None, :]
            b_x = tl.load(p_x[:, None] + o_k[None, :], mask=in_x, other=0.0)
            in_a = in_rank[None, :] & (o_k < K)[:, None]
            b_a = tl.load(p_a + o_r[None, :] * K + o_k[:, None], mask=in_a, other=0.0)
            s = tl.dot(b_x, b_a, s, input_precision="ieee")
    else:
        sums = tl.zeros((WAYS, BLOCK_M, BLOCK_R), tl.float32)
        for i in range(0, STEPS):
            o_way = first_k + i * BLOCK_K + tl.arange(0, WAYS) * PART
            o_k = o_way[:, None, None] + tl.arange(0, PART)[None, None, :]
            in_x = (token >= 0)[None, :, None] & (o_k < K)
            b_x = tl.load(p_x[None, :, None] + o_k, mask=in_x, other=0.0)
            in_a = in_rank[None, :, None] & (o_k < K)
            b_a = tl.load(p_a + o_r[None, :, None] * K + o_k, mask=in_a, other=0.0)
            sums = tl.dot(b_x, tl.permute(b_a, (0, 2, 1)), sums, input_precision="ieee")
        s = tl.sum(sums, axis=0)
    # What lies behind the rank counts as nothing, whatever it is.
    return tl.where((o_r < rank)[None, :], s, 0.0)


@triton.jit
def load_sums(
    p_s,
    o_row,
    in_row,
    r,
    rank,
    split_stride,
    COLUMNS: tl.constexpr,
    WHOLE_UNITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the sums `[BLOCK_M, BLOCK_R]` fp32 of ranks r.., over all splits."""
    o_r = r + tl.arange(0, BLOCK_R)
    # Whole units, so that several sums are loaded at once.
    in_rank = o_r // RANK_UNIT * RANK_UNIT < rank
    if not WHOLE_UNITS:
        in_rank = in_rank & (o_r < COLUMNS)
    inside = in_row[:, None] & in_rank[None, :]
    p_split = p_s + o_row[:, None] + o_r[None, :]
    s = tl.load(p_split, mask=inside, other=0.0).to(tl.float32)
    for i in range(1, SPLITS):
        s += tl.load(p_split + i * split_stride, mask=inside, other=0.0)
    return s


@triton.jit
def expand_tile(s, b_b):
    """Return s B `[BLOCK_M, BLOCK_N]` fp32 for fp32 s: weights of 16 bits meet its high part and what is left of it."""
    if b_b.dtype == tl.bfloat16:
        high = s.to(tl.bfloat16)
        product = tl.dot(high, b_b)
        product = tl.dot((s - high.to(tl.float32)).to(tl.bfloat16), b_b, product)
    elif b_b.dtype == tl.float16:
        # In TF32, which holds every fp16: as fp16, s might overflow.
        high = (s.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        wide = b_b.to(tl.float32)
        product = tl.dot(high, wide, input_precision="tf32")
        product = tl.dot(s - high, wide, product, input_precision="tf32")
    else:
        product = tl.dot(s, b_b, input_precision="ieee")
    return product


@triton.jit
def load_scale(scales, slot, i_slice, S: tl.constexpr):
    """Return what multiplies an adapter's product in a slice: 1 where there are no `scales`."""
    if scales is None:
        scale = 1.0
    else:
        scale = tl.load(scales + slot.to(tl.int64) * S + i_slice)
    return scale


@triton.jit
def load_factor(factors, slot, o_n, end, N: tl.constexpr):
    """Return what multiplies the outputs `[1, BLOCK_N]`: 1 where there are no `factors`."""
    if factors is None:
        factor = 1.0
    else:
        factor = tl.load(factors + slot.to(tl.int64) * N + o_n, mask=o_n < end, other=1.0)[None, :]
    return factor
