"""What the attention kernels for Hopper bring to shared memory, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def copy_tile(
    tiles,
    buffers,
    channel,
    step,
    page,
    start,
    end,
    T: gl.constexpr,
    TILES: gl.constexpr,
    PAGE: gl.constexpr,
    BEHIND: gl.constexpr,
):
    """Begin to copy a tile of a page, the T-th from the keys of the block that key `start` begins, if it is there.

    A block has TILES: its keys, then its values where these have pages of their own. step: how many tiles of this
    program are before that block.
    """
    k_tiles, beside_tiles = tiles
    tiles_s, behind_s, bars = buffers
    STAGES: gl.constexpr = tiles_s.shape[0]
    BLOCK_N: gl.constexpr = tiles_s.shape[1]
    DV: gl.constexpr = tiles_s.shape[2]
    i_key = start + T // TILES * BLOCK_N
    is_here = i_key < end
    stage = (step + T) % STAGES
    bar = bars.index(stage)
    at = page * PAGE + i_key % PAGE
    mbarrier.expect(bar, 2 * BLOCK_N * (DV + BEHIND), pred=is_here)
    if T % TILES == 0:
        tma.async_copy_global_to_shared(k_tiles, [at, channel], bar, tiles_s.index(stage), pred=is_here)
        if BEHIND > 0:
            tma.async_copy_global_to_shared(beside_tiles, [at, DV], bar, behind_s.index(stage), pred=is_here)
    else:
        tma.async_copy_global_to_shared(beside_tiles, [at, channel], bar, tiles_s.index(stage), pred=is_here)


@gluon.jit
def load_queries(
    q_s,
    q,
    q_stride,
    begin,
    first,
    n,
    h,
    Q_HEAD: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copy channels of the queries of the tokens from `first` on and the heads from h on to shared memory; zeros where
    there is none."""
    BLOCK_M: gl.constexpr = q_s.shape[0]
    D: gl.constexpr = q_s.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    i_t = first + o_m // GROUP
    at = (begin + i_t).to(gl.int64) * q_stride + (h + o_m % GROUP) * Q_HEAD
    is_here = (o_m < BLOCK_M // GROUP * GROUP) & (i_t < n)
    q_s.store(gl.load(q + (at[:, None] + o_d[None, :]), mask=is_here[:, None] & (o_d >= 0)[None, :], other=0.0))
