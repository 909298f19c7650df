"""Attention of short rows for Hopper, in Gluon: keys and values come by the copy engine while others are computed.

A tile has as columns the queries of a few tokens and of all heads that share a head of keys; its rows are keys, and
channels of the output:

    S = scale K Q^T;  P = exp2(S log2 e - m);  O = O exp2(m' - m) + V^T P

A block of keys is part of one page, whose rows the copy engine brings as they are: a tile of keys, then one of values,
into a ring of tiles in shared memory. V^T is a tile read the other way round. So the values of latents, which are the
first channels of their keys, are no second tile: one copy serves both products. What takes a tile's place is asked for
as soon as its product is done; a program goes through the splits of the same queries in one loop, whose copies never
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from deltaline_kernels.attention.hopper_copies import copy_tile, load_queries
from deltaline_kernels.attention.inputs import Keys, Queries
from deltaline_kernels.attention.items import count_rows, pick
from deltaline_kernels.attention.modifiers.modify import load_masks, load_scores, modify, sees
from deltaline_kernels.attention.modifiers.shipped import SHIPPED
from deltaline_kernels.attention.modifiers.spec import num_clauses, num_scores
from deltaline_kernels.attention.output import LOG2_E, finish, store_sums
from deltaline_kernels.attention.plan import (
    HOPPER_KEYS,
    LATENT_DIM,
    LATENTS_BEHIND,
    MOST_SHORT_COLUMNS,
    SHORT_DIMS,
    Tile,
    count_at_once,
)
from deltaline_kernels.device.hopper import barrier, clear_rows, on_hopper
from deltaline_kernels.device.sizes import pow2
from deltaline_kernels.rows import Rows


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(
    do_not_specialize=["control_stride", "table_stride", "num_rows"],
    do_not_specialize_on_alignment=["control", "page_table"],
)
def attend_short_kernel(
    k_tiles,
    beside_tiles,
    q,
    page_table,
    control,
    parameters,
    sinks,
    gate,
    o,
    lse,
    partials,
    q_stride,
    control_stride,
    table_stride,
    num_rows,
    SCALE: gl.constexpr,
    HQ: gl.constexpr,
    # Values are the first channels of keys, which have BEHIND more.
    LATENT: gl.constexpr,
    BEHIND: gl.constexpr,
    Q_HEAD: gl.constexpr,
    GATE_ROW: gl.constexpr,
    GATE_HEAD: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_LSE: gl.constexpr,
    PAGE: gl.constexpr,
    SPEC: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DV: gl.constexpr,
    # Of a multiple of BLOCK_N keys; of more than a row has where nothing is to be combined.
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    # Tiles in shared memory.
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write what the items of a program attend to: the outputs, or those of splits."""
    if OVERLAP:
        # The combine may start, and wait.
        gdc_launch_dependents()
    HEADS: gl.constexpr = HQ // GROUP
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    COLUMNS: gl.constexpr = TOKENS * GROUP
    ITEM: gl.constexpr = COLUMNS * DV + (2 * COLUMNS + 3) // 4 * 4
    MODIFIED: gl.constexpr = num_scores(SPEC) > 0
    # Of a block of keys; and, counted from its first, the one that takes the place of its last.
    TILES: gl.constexpr = 1 if LATENT else 2
    LAST: gl.constexpr = STAGES + TILES - 1
    # Warps beside each other have other columns of scores: 4 have all keys of a block.
    ACROSS: gl.constexpr = WARPS // 4
    dtype: gl.constexpr = k_tiles.dtype
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, BLOCK_M // ACROSS, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    across_s: gl.constexpr = gl.SliceLayout(0, mma_s)
    across_o: gl.constexpr = gl.SliceLayout(0, mma_o)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_M, 16, 2)

    tiles_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DV], k_tiles.layout)
    q_s = gl.allocate_shared_memory(dtype, [1, BLOCK_M, DV], k_tiles.layout)
    if BEHIND > 0:
        behind_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BEHIND], beside_tiles.layout)
        q_behind_s = gl.allocate_shared_memory(dtype, [1, BLOCK_M, BEHIND], beside_tiles.layout)
    else:
        behind_s = tiles_s
    p_s = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], p_layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_bar in gl.static_range(STAGES):
        mbarrier.init(bars.index(i_bar), count=1)
    fence_async_shared()
    barrier()
    tiles = (k_tiles, beside_tiles)
    buffers = (tiles_s, behind_s, bars)

    o_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma_s))
    o_s = gl.arange(0, BLOCK_M, layout=across_s)
    o_m = gl.arange(0, BLOCK_M, layout=across_o)
    o_v = gl.arange(0, DV, layout=gl.SliceLayout(1, mma_o))
    no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma_s)
    no_sums = gl.zeros([DV, BLOCK_M], gl.float32, mma_o)
    nothing = gl.full([BLOCK_M], float("-inf"), gl.float32, across_s)

    rows_by_head: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [1, 0]))
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    o_r = gl.arange(0, ROWS, layout=rows_by_head)
    count, row_splits, row_low, row_high = count_rows(
        o_r, control, control_stride, num_rows, parameters, control, HQ, HEADS, TOKENS, SPLIT, False, None, SPEC
    )
    o_r, count = gl.convert_layout(o_r, flat), gl.convert_layout(count, flat)
    row_splits = gl.convert_layout(row_splits, flat)
    row_low, row_high = gl.convert_layout(row_low, flat), gl.convert_layout(row_high, flat)
    pid = gl.program_id(0)
    num_items = gl.sum(count, 0)
    share = num_items // gl.num_programs(0)
    more = num_items % gl.num_programs(0)
    item = pid * share + gl.minimum(pid, more)
    end_item = item + share + gl.where(pid < more, 1, 0)
    # Blocks that this program has computed.
    done = item * 0
    while item < end_item:
        row, base, splits, low, high = pick(o_r, item, count, row_splits, row_low, row_high)
        begin = gl.load(control + row)
        n = gl.load(control + row + 1) - begin
        b = gl.load(control + 2 * control_stride + row)
        position = gl.load(control + 6 * control_stride + row)
        line = gl.maximum(b, 0)
        num_keys = gl.where(b >= 0, gl.maximum(position + n, 0), 0)
        i_split = (item - base) % splits
        rest = (item - base) // splits
        # Items of the same queries that this program takes in one go.
        run = gl.minimum(splits - i_split, end_item - item)
        h = rest % HEADS * GROUP
        # Where the head's keys and values are in a row of a page; latents have one head.
        channel = 0 if LATENT else rest % HEADS * DV
        first_token = rest // HEADS * TOKENS
        i_first = low // SPLIT + i_split
        first = gl.maximum(low // BLOCK_N * BLOCK_N, i_first * SPLIT)
        end = gl.minimum(high, (i_first + run) * SPLIT)
        num_blocks = gl.maximum(end - first + BLOCK_N - 1, 0) // BLOCK_N
        p_table = page_table + line.to(gl.int64) * table_stride
        for ahead in gl.static_range(STAGES):
            start = first + ahead // TILES * BLOCK_N
            own = gl.load(p_table + start // PAGE, mask=start < end, other=0)
            copy_tile(tiles, buffers, channel, done * TILES, own, first, end, ahead, TILES, PAGE, BEHIND)
        load_queries(q_s.index(0), q, q_stride, begin, first_token, n, h, Q_HEAD, GROUP, WARPS)
        if BEHIND > 0:
            load_queries(q_behind_s.index(0), q + DV, q_stride, begin, first_token, n, h, Q_HEAD, GROUP, WARPS)
        fence_async_shared()
        barrier()

        h_s = (h + o_s % GROUP)[None, :]
        q_at = (position + first_token + o_s // GROUP)[None, :]
        score_values = load_scores(parameters, line, h_s, SPEC)
        mask_values = load_masks(parameters, line, h_s, SPEC)
        i_t = first_token + o_m // GROUP
        in_m = (i_t < n) & (o_m < COLUMNS)
        p_item = partials + item.to(gl.int64) * ITEM
        m = nothing
        # Each thread's own: they are put together where a split ends.
        sums = no_scores
        acc = no_sums
        ahead = STAGES // TILES * BLOCK_N
        page = gl.load(p_table + (first + ahead) // PAGE, mask=first + ahead < end, other=0)
        for i in range(0, num_blocks):
            start = first + i * BLOCK_N
            step = (done + i) * TILES
            stage = step % STAGES
            # Nothing that an assembler knows: it would keep where each product finds its queries in a register.
            zero = gl.minimum(done + i, 0)
            # The pages of blocks whose tiles take these ones' places: loaded before, so that nothing waits for them.
            then = start + ahead + BLOCK_N
            next_page = gl.load(p_table + then // PAGE, mask=then < end, other=0)
            mbarrier.wait(bars.index(stage), step // STAGES % 2)
            # What is behind a row's keys may be anything, and 0 times that no number.
            is_cut = start + BLOCK_N > num_keys
            if LATENT and is_cut:
                clear_rows(tiles_s.index(stage), num_keys - start, WARPS)
            s = warpgroup_mma(
                tiles_s.index(stage), q_s.index(zero).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            if BEHIND > 0:
                s = warpgroup_mma(behind_s.index(stage), q_behind_s.index(zero).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            kv = (start + o_n)[:, None]
            if MODIFIED:
                s = modify(s * SCALE, score_values, line, h_s, q_at, kv, SPEC)
            else:
                s *= SCALE * LOG2_E
            seen = kv < num_keys
            if num_clauses(SPEC) > 0:
                seen = seen & sees(mask_values, line, h_s, q_at, kv, SPEC)
            s = gl.where(seen, s, float("-inf"))
            # Of modified scores the maximum alone becomes an exponent of 2, as in kernel.py.
            largest = gl.max(s, 0)
            new_m = gl.maximum(m, largest * LOG2_E if MODIFIED else largest)
            # Where nothing was seen yet the difference of two infinities would be no number.
            safe = gl.where(new_m == float("-inf"), 0.0, new_m)
            decay = gl.exp2(m - safe)
            p = gl.exp2(gl.fma(s, LOG2_E, -safe[None, :]) if MODIFIED else s - safe[None, :])
            p_s.store(p.to(dtype))
            fence_async_shared()
            sums = sums * decay[None, :] + p
            acc = acc * gl.convert_layout(decay, across_o)[None, :]
            m = new_m
            barrier()
            if not LATENT:
                # The scores were all that needed the keys.
                copy_tile(tiles, buffers, channel, step, page, start, end, STAGES, TILES, PAGE, BEHIND)
                stage = (step + 1) % STAGES
                mbarrier.wait(bars.index(stage), (step + 1) // STAGES % 2)
                if is_cut:
                    clear_rows(tiles_s.index(stage), num_keys - start, WARPS)
            acc = warpgroup_mma(tiles_s.index(stage).permute((1, 0)), p_s, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            own = next_page if LAST // TILES > STAGES // TILES else page
            copy_tile(tiles, buffers, channel, step, own, start, end, LAST, TILES, PAGE, BEHIND)
            page = next_page
            if (((start + BLOCK_N) % SPLIT == 0) | (i == num_blocks - 1)) & (splits > 1):
                top = gl.convert_layout(m, across_o)
                total = gl.convert_layout(gl.sum(sums, 0), across_o)
                store_sums(p_item, acc, top, total, o_m, o_v, in_m, COLUMNS, DV)
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
                h + o_m % GROUP,
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


def can_attend_short(queries: Queries, keys: Keys) -> bool:
    """Return whether `launch_short` runs on this device with these sizes and modifiers."""
    q, heads = queries.q, queries.heads
    if heads.is_latent:
        fits = heads.num_keys == 1 and heads.value_dim == LATENT_DIM and heads.behind_latent in LATENTS_BEHIND
    else:
        fits = heads.value_dim == heads.key_dim in SHORT_DIMS and heads.group <= MOST_SHORT_COLUMNS
    return (
        fits
        and on_hopper(q.device)
        and q.element_size() == 2
        and keys.page_table is not None
        and keys.page_size >= HOPPER_KEYS
        and keys.has_tiles
        and queries.blocks is None
        # Of other packages' nothing tells whether Gluon takes them.
        and all(leaf.part.modifier in SHIPPED.values() for leaf in queries.modifiers.all_leaves)
        # `find_range` has no layout for heads.
        and not queries.modifiers.ranges_by_head
    )


def launch_short(
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
    layout = gl.NVMMASharedLayout(128, 16, 2)

    def tiles(pages: Tensor, width: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(pages.flatten(0, 1).flatten(1), [tile.keys, width], layout)

    beside = tiles(keys.k, 64) if keys.v is None else tiles(keys.v, heads.value_dim)
    attend_short_kernel[(programs,)](
        tiles(keys.k, heads.value_dim),
        beside,
        q,
        keys.page_table,
        rows.control,
        queries.modifiers.parameters,
        *outputs,
        q.stride(0),
        rows.control.stride(0),
        keys.page_table.stride(0),
        rows.num_rows,
        SCALE=heads.scale,
        LATENT=heads.is_latent,
        BEHIND=heads.behind_latent,
        Q_HEAD=q.stride(1),
        PAGE=keys.page_size,
        SPEC=queries.modifiers.spec,
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
