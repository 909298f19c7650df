"""Causal attention of short rows over latents for Hopper, in Gluon: one copy of a block of keys serves both products.

A tile has as columns the queries of a few tokens and of all heads that share the latents; its rows are keys, and
channels of the output:

    S = scale K Q^T;  P = exp2(S log2 e - m);  O = O exp2(m' - m) + V^T P

A block of keys is part of one page, whose rows lie together: the copy engine brings it as it is, its latents and what
is behind them. V is its latents, and V^T the same block of shared memory, read the other way round. While a block is
computed the next one comes; a program goes through the splits of the same queries in one loop, whose copies never
pause. Items of work, and what a split leaves for the combine, are those of kernel.py. Every operand is in shared
memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from deltaline_kernels.attention.inputs import Keys, Queries
from deltaline_kernels.attention.output import finish, store_sums
from deltaline_kernels.attention.plan import LATENT_DIM, LATENT_KEYS, LATENTS_BEHIND, Tile, count_at_once
from deltaline_kernels.device.hopper import barrier, clear_rows, on_hopper
from deltaline_kernels.device.sizes import pow2
from deltaline_kernels.rows import Rows

LOG2_E = 1.4426950408889634


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _count_rows(
    control,
    control_stride,
    num_rows,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Return how many items each row has, and how many splits, as items.py counts them of a causal mask."""
    o_r = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    is_row = o_r < num_rows
    begin = gl.load(control + o_r, mask=is_row, other=0)
    n = gl.load(control + o_r + 1, mask=is_row, other=0) - begin
    b = gl.load(control + 2 * control_stride + o_r, mask=is_row, other=-1)
    position = gl.load(control + 6 * control_stride + o_r, mask=is_row, other=0)
    num_keys = gl.where((b >= 0) & (n > 0), gl.maximum(position + n, 0), 0)
    splits = gl.maximum((num_keys + SPLIT - 1) // SPLIT, 1)
    return (n + TOKENS - 1) // TOKENS * splits * HEADS, splits


@gluon.jit
def _find_item(item, count, row_splits, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Return of item `item` of rows that `_count_rows` counted: its row, the row's first item and its splits."""
    o_r = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    row = gl.sum((gl.associative_scan(count, 0, _add) <= item).to(gl.int32), 0)
    base = gl.sum(gl.where(o_r < row, count, 0), 0)
    return row, base, gl.sum(gl.where(o_r == row, row_splits, 0), 0)


@gluon.jit
def _copy_block(tiles, buffers, step, page, i_key, is_here, PAGE: gl.constexpr, BEHIND: gl.constexpr):
    """Begin to copy the block of a page that key i_key begins, the step-th one of this program, if it is there."""
    k_tiles, behind_tiles = tiles
    k_s, behind_s, bars = buffers
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[1]
    DV: gl.constexpr = k_s.shape[2]
    stage = step % STAGES
    bar = bars.index(stage)
    at = page * PAGE + i_key % PAGE
    mbarrier.expect(bar, 2 * BLOCK_N * (DV + BEHIND), pred=is_here)
    tma.async_copy_global_to_shared(k_tiles, [at, 0], bar, k_s.index(stage), pred=is_here)
    if BEHIND > 0:
        tma.async_copy_global_to_shared(behind_tiles, [at, DV], bar, behind_s.index(stage), pred=is_here)


@gluon.jit
def _load_queries(
    q_s,
    q,
    q_stride,
    begin,
    first,
    n,
    h,
    Q_HEAD: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Copy channels of the queries of the tokens from `first` on and the heads from h on to shared memory, PADDED for
    each token; zeros where there is none."""
    BLOCK_M: gl.constexpr = q_s.shape[0]
    D: gl.constexpr = q_s.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    i_t = first + o_m // PADDED
    at = (begin + i_t).to(gl.int64) * q_stride + (h + o_m % PADDED) * Q_HEAD
    is_here = (o_m % PADDED < GROUP) & (i_t < n)
    q_s.store(gl.load(q + (at[:, None] + o_d[None, :]), mask=is_here[:, None] & (o_d >= 0)[None, :], other=0.0))


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(
    do_not_specialize=["control_stride", "table_stride", "num_rows"],
    do_not_specialize_on_alignment=["control", "page_table"],
)
def attend_latents_kernel(
    k_tiles,
    behind_tiles,
    q,
    page_table,
    control,
    sinks,
    gate,
    o,
    lse,
    partials,
    q_stride,
    control_stride,
    table_stride,
    num_rows,
    # The scale of exponents of 2.
    C: gl.constexpr,
    HQ: gl.constexpr,
    BEHIND: gl.constexpr,
    Q_HEAD: gl.constexpr,
    GATE_ROW: gl.constexpr,
    GATE_HEAD: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_LSE: gl.constexpr,
    PAGE: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DV: gl.constexpr,
    # Of a multiple of BLOCK_N keys; of more than a row has where nothing is to be combined.
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write what the items of a program attend to: the outputs, or those of splits."""
    if OVERLAP:
        # The combine may start, and wait.
        gdc_launch_dependents()
    HEADS: gl.constexpr = HQ // GROUP
    TOKENS: gl.constexpr = BLOCK_M // PADDED
    COLUMNS: gl.constexpr = TOKENS * GROUP
    ITEM: gl.constexpr = COLUMNS * DV + (2 * COLUMNS + 3) // 4 * 4
    # Warps beside each other have other columns of scores: 4 have all keys of a block.
    ACROSS: gl.constexpr = WARPS // 4
    dtype: gl.constexpr = k_tiles.dtype
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, BLOCK_M // ACROSS, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    across_s: gl.constexpr = gl.SliceLayout(0, mma_s)
    across_o: gl.constexpr = gl.SliceLayout(0, mma_o)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_M, 16, 2)

    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DV], k_tiles.layout)
    q_s = gl.allocate_shared_memory(dtype, [1, BLOCK_M, DV], k_tiles.layout)
    if BEHIND > 0:
        behind_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BEHIND], behind_tiles.layout)
        q_behind_s = gl.allocate_shared_memory(dtype, [1, BLOCK_M, BEHIND], behind_tiles.layout)
    else:
        behind_s = k_s
    p_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], p_layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_bar in gl.static_range(STAGES):
        mbarrier.init(bars.index(i_bar), count=1)
    fence_async_shared()
    barrier()
    tiles = (k_tiles, behind_tiles)
    buffers = (k_s, behind_s, bars)

    o_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma_s))
    o_s = gl.arange(0, BLOCK_M, layout=across_s)
    o_m = gl.arange(0, BLOCK_M, layout=across_o)
    o_v = gl.arange(0, DV, layout=gl.SliceLayout(1, mma_o))
    column = o_m // PADDED * GROUP + o_m % PADDED
    no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma_s)
    no_sums = gl.zeros([DV, BLOCK_M], gl.float32, mma_o)
    nothing = gl.full([BLOCK_M], float("-inf"), gl.float32, across_s)

    count, row_splits = _count_rows(control, control_stride, num_rows, HEADS, TOKENS, SPLIT, ROWS, WARPS)
    pid = gl.program_id(0)
    num_items = gl.sum(count, 0)
    share = num_items // gl.num_programs(0)
    more = num_items % gl.num_programs(0)
    item = pid * share + gl.minimum(pid, more)
    end_item = item + share + gl.where(pid < more, 1, 0)
    # Blocks that this program has computed.
    done = item * 0
    while item < end_item:
        row, base, splits = _find_item(item, count, row_splits, ROWS, WARPS)
        begin = gl.load(control + row)
        n = gl.load(control + row + 1) - begin
        b = gl.load(control + 2 * control_stride + row)
        position = gl.load(control + 6 * control_stride + row)
        num_keys = gl.where(b >= 0, gl.maximum(position + n, 0), 0)
        i_split = (item - base) % splits
        rest = (item - base) // splits
        # Items of the same queries that this program takes in one go.
        run = gl.minimum(splits - i_split, end_item - item)
        h = rest % HEADS * GROUP
        first_token = rest // HEADS * TOKENS
        first = i_split * SPLIT
        end = gl.minimum(num_keys, first + run * SPLIT)
        num_blocks = gl.maximum(end - first + BLOCK_N - 1, 0) // BLOCK_N
        p_table = page_table + gl.maximum(b, 0).to(gl.int64) * table_stride
        for ahead in gl.static_range(STAGES):
            start = first + ahead * BLOCK_N
            own = gl.load(p_table + start // PAGE, mask=start < end, other=0)
            _copy_block(tiles, buffers, done + ahead, own, start, start < end, PAGE, BEHIND)
        _load_queries(q_s.index(0), q, q_stride, begin, first_token, n, h, Q_HEAD, GROUP, PADDED, WARPS)
        if BEHIND > 0:
            _load_queries(q_behind_s.index(0), q + DV, q_stride, begin, first_token, n, h, Q_HEAD, GROUP, PADDED, WARPS)
        fence_async_shared()
        barrier()

        # The last key that each column sees.
        last = position + first_token + o_s // PADDED
        i_t = first_token + o_m // PADDED
        in_m = (i_t < n) & (o_m % PADDED < GROUP)
        p_item = partials + item.to(gl.int64) * ITEM
        m = nothing
        # Each thread's own: they are put together where a split ends.
        sums = no_scores
        acc = no_sums
        page = gl.load(p_table + (first + STAGES * BLOCK_N) // PAGE, mask=num_blocks > STAGES, other=0)
        for i in range(0, num_blocks):
            start = first + i * BLOCK_N
            stage = (done + i) % STAGES
            # Nothing that an assembler knows: it would keep where each product finds its queries in a register.
            zero = gl.minimum(done + i, 0)
            # The block that takes this one's place; and the one behind it, so that nothing waits for a page's number.
            then = start + STAGES * BLOCK_N
            next_page = gl.load(p_table + (then + BLOCK_N) // PAGE, mask=then + BLOCK_N < end, other=0)
            mbarrier.wait(bars.index(stage), (done + i) // STAGES % 2)
            if start + BLOCK_N > num_keys:
                # What is behind a row's keys may be anything, and 0 times that no number.
                clear_rows(k_s.index(stage), num_keys - start, WARPS)
            s = warpgroup_mma(
                k_s.index(stage), q_s.index(zero).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            if BEHIND > 0:
                s = warpgroup_mma(behind_s.index(stage), q_behind_s.index(zero).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            kv = start + o_n
            seen = (kv[:, None] <= last[None, :]) & (kv < num_keys)[:, None]
            s = gl.where(seen, s * C, float("-inf"))
            new_m = gl.maximum(m, gl.max(s, 0))
            # Where nothing was seen yet the difference of two infinities would be no number.
            safe = gl.where(new_m == float("-inf"), 0.0, new_m)
            decay = gl.exp2(m - safe)
            p = gl.exp2(s - safe[None, :])
            p_s.store(p.to(dtype))
            fence_async_shared()
            sums = sums * decay[None, :] + p
            acc = acc * gl.convert_layout(decay, across_o)[None, :]
            m = new_m
            barrier()
            acc = warpgroup_mma(k_s.index(stage).permute((1, 0)), p_s, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            _copy_block(tiles, buffers, done + i + STAGES, page, then, then < end, PAGE, BEHIND)
            page = next_page
            if (((start + BLOCK_N) % SPLIT == 0) | (i == num_blocks - 1)) & (splits > 1):
                top = gl.convert_layout(m, across_o)
                total = gl.convert_layout(gl.sum(sums, 0), across_o)
                store_sums(p_item, acc, top, total, column, o_v, in_m, COLUMNS, DV)
                p_item += ITEM
                m = nothing
                sums = no_scores
                acc = no_sums
        done += num_blocks
        if splits == 1:
            top = gl.convert_layout(m, across_o)
            total = gl.convert_layout(gl.sum(sums, 0), across_o)
            finish(
                acc,
                top,
                total,
                begin + i_t,
                gl.minimum(h + o_m % PADDED, HQ - 1),
                o_v,
                in_m,
                b >= 0,
                sinks,
                gate,
                o,
                lse,
                GATE_ROW,
                HQ,
                DV,
                GATE_HEAD,
                HAS_SINKS,
                HAS_GATE,
                HAS_LSE,
            )
        item += run


def can_attend_latents(queries: Queries, keys: Keys) -> bool:
    """Return whether `launch_latents` runs on this device with these sizes, a causal mask and no other modifier."""
    q, heads = queries.q, queries.heads
    return (
        on_hopper(q.device)
        and q.element_size() == 2
        and heads.is_latent
        and heads.num_keys == 1
        and heads.value_dim == LATENT_DIM
        and heads.behind_latent in LATENTS_BEHIND
        and keys.page_table is not None
        # Of nothing the copy engine has no tiles.
        and keys.k.shape[0] > 0
        and keys.page_size >= LATENT_KEYS
        and queries.is_only_causal
        # The copy engine's.
        and keys.k.data_ptr() % 16 == 0
    )


def launch_latents(
    queries: Queries,
    keys: Keys,
    rows: Rows,
    tile: Tile,
    programs: int,
    outputs: tuple[Tensor, ...],
    *,
    split: int,
    overlap: bool,
    **constants: Any,
) -> None:
    """Write what kernel.py's `attend_kernel` does: the rows' outputs, or of `split` keys each what is to be combined.

    outputs: sinks, gate, o, lse, partials. split: 0 where nothing is to be combined. constants: of both kernels.
    """
    q, heads = queries.q, queries.heads
    assert keys.page_table is not None
    pages, layout = keys.k.flatten(0, 2), gl.NVMMASharedLayout(128, 16, 2)
    attend_latents_kernel[(programs,)](
        *(TensorDescriptor.from_tensor(pages, [tile.keys, width], layout) for width in (heads.value_dim, 64)),
        q,
        keys.page_table,
        rows.control,
        *outputs,
        q.stride(0),
        rows.control.stride(0),
        keys.page_table.stride(0),
        rows.num_rows,
        C=heads.scale * LOG2_E,
        BEHIND=heads.behind_latent,
        Q_HEAD=q.stride(1),
        PAGE=keys.page_size,
        PADDED=tile.columns // tile.tokens,
        BLOCK_M=tile.columns,
        BLOCK_N=tile.keys,
        SPLIT=split or 1 << 30,
        ROWS=max(count_at_once(rows.num_rows), pow2(rows.num_rows)),
        STAGES=tile.stages,
        OVERLAP=overlap,
        WARPS=tile.num_warps,
        num_warps=tile.num_warps,
        **constants,
    )
