"""Causal attention of long rows for Hopper, in Gluon: each product of a tile is begun before it is waited for.

A tile has as rows the queries of a few tokens and of all heads that share a head of keys:

    S = Q K^T;  P = exp2(C S - m);  O = O exp2(m' - m) + P V,  C = scale log2 e

While the matrix unit computes S of the next block of keys and P V of this one, the warps turn the next S into P; so the
exponentials cost little beside products. Pages come by the copy engine, each block of keys as one box. Only the last
blocks of a tile are masked, and values behind a row's keys, which may be anything, are overwritten with zeros in shared
memory. P is a left operand in registers, and named where its product is waited for, so that no assembler hands its
registers to something else in between.
"""

from __future__ import annotations

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

from deltaline_kernels.attention.hopper_copies import load_queries
from deltaline_kernels.attention.inputs import Keys, Queries
from deltaline_kernels.attention.plan import FEW_ROWS, HOPPER
from deltaline_kernels.device.hopper import barrier, clear_rows, on_hopper
from deltaline_kernels.device.sizes import pow2
from deltaline_kernels.rows import Rows

LOG2_E = 1.4426950408889634


@gluon.jit
def _copy_pair(tiles, buffers, i, num_blocks, pages, columns, PAGE: gl.constexpr):
    """Begin to copy what step i of num_blocks takes: the keys of block i and the values of the one before it.

    The first step has no use for values and the one behind the last none for keys. They are copied all the same, in
    place of a second and a third case of how many bytes come.
    """
    k_tiles, v_tiles = tiles
    k_s, v_s, bars = buffers
    STAGES: gl.constexpr = k_s.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[1]
    stage = i % STAGES
    bar = bars.index(stage)
    is_here = (i <= num_blocks) & (num_blocks > 0)
    k_at = [pages[0] * PAGE + gl.minimum(i, num_blocks - 1) * BLOCK_N % PAGE, columns[0]]
    v_at = [pages[1] * PAGE + gl.maximum(i - 1, 0) * BLOCK_N % PAGE, columns[1]]
    mbarrier.expect(bar, 2 * BLOCK_N * (k_s.shape[2] + v_s.shape[2]), pred=is_here)
    tma.async_copy_global_to_shared(k_tiles, k_at, bar, k_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(v_tiles, v_at, bar, v_s.index(stage), pred=is_here)


@gluon.jit
def _load_page(p_table, i, num_blocks, BLOCK_N: gl.constexpr, PAGE: gl.constexpr):
    """Return the page of block i, or of one that there is."""
    return gl.load(p_table + gl.maximum(gl.minimum(i, num_blocks - 1), 0) * BLOCK_N // PAGE)


@gluon.jit
def _find_row(control, num_rows, slot, TOKENS: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Return the row that has a slot: that of row i are from begin // TOKENS + i on, as many as it can need."""
    o_r = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    slots = gl.load(control + o_r, mask=o_r < num_rows, other=1 << 30) // TOKENS + o_r
    return gl.sum((slots <= slot).to(gl.int32), 0) - 1


@gluon.jit
def _soften(s, m, C: gl.constexpr, dtype: gl.constexpr):
    """Return the new maxima of exponents, the weights of a block of scores, rounded, and their sums."""
    m = gl.maximum(m, gl.max(s, 1) * C)
    p = gl.exp2(s * C - m[:, None])
    return m, p.to(dtype), gl.sum(p, 1)


@gluon.jit
def _finish(
    acc,
    m,
    total,
    begin,
    first,
    n,
    h,
    is_live,
    sinks,
    gate,
    o,
    lse,
    GATE_ROW: gl.constexpr,
    GATE_HEAD: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_LSE: gl.constexpr,
    HQ: gl.constexpr,
    GROUP: gl.constexpr,
    mma: gl.constexpr,
):
    """Store the outputs of a tile, as output.py's `finish` does; acc is `[M, DV]`, m and total are `[M]`."""
    LN_2: gl.constexpr = 0.6931471805599453
    LOG2_E: gl.constexpr = 1.4426950408889634
    BLOCK_M: gl.constexpr = acc.shape[0]
    DV: gl.constexpr = acc.shape[1]
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, mma))
    o_v = gl.arange(0, DV, layout=gl.SliceLayout(0, mma))
    i_t = first + o_m // GROUP
    h = h + o_m % GROUP
    in_m = (o_m < BLOCK_M // GROUP * GROUP) & (i_t < n)
    i_t = (begin + i_t).to(gl.int64)
    if HAS_SINKS:
        sink = gl.load(sinks + h, mask=in_m, other=0.0) * LOG2_E
        top = gl.where(is_live, gl.maximum(m, sink), m)
        decay = gl.exp2(m - top)
        total = gl.where(is_live, total * decay + gl.exp2(sink - top), total)
        acc = acc * decay[:, None]
        m = top
    total = gl.where(is_live, total, 1.0)
    b_o = acc / total[:, None]
    in_o = in_m[:, None] & (o_v >= 0)[None, :]
    at = i_t * HQ + h
    if HAS_GATE:
        at_gate = (i_t * GATE_ROW + h * GATE_HEAD)[:, None] + o_v[None, :]
        b_gate = gl.load(gate + at_gate, mask=in_o, other=0.0).to(gl.float32)
        b_o = b_o / (1.0 + gl.exp2(b_gate * -LOG2_E))
    gl.store(o + ((at * DV)[:, None] + o_v[None, :]), b_o.to(o.dtype.element_ty), mask=in_o)
    if HAS_LSE:
        b_lse = (m + gl.log2(total)) * LN_2
        gl.store(lse + at, gl.where(is_live, b_lse, float("-inf")), mask=in_m)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(
    do_not_specialize=["control_stride", "table_stride", "num_rows", "num_slots"],
    do_not_specialize_on_alignment=["control", "page_table"],
)
def attend_long_kernel(
    q,
    k_tiles,
    v_tiles,
    page_table,
    control,
    sinks,
    gate,
    o,
    lse,
    q_stride,
    control_stride,
    table_stride,
    num_rows,
    num_slots,
    # The scale of exponents of 2, above 0.
    C: gl.constexpr,
    HQ: gl.constexpr,
    HKV: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    Q_HEAD: gl.constexpr,
    GATE_ROW: gl.constexpr,
    GATE_HEAD: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_LSE: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write what a tile of a row's queries attends to of a head of keys."""
    GROUP: gl.constexpr = HQ // HKV
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    dtype: gl.constexpr = k_tiles.dtype
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DV, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    down_s: gl.constexpr = gl.SliceLayout(1, mma_s)
    down_o: gl.constexpr = gl.SliceLayout(1, mma_o)

    # The last tiles of rows see most keys, and begin first.
    slot = num_slots - 1 - gl.program_id(0) // HKV + gl.load(control) // TOKENS
    i_kv = gl.program_id(0) % HKV
    row = _find_row(control, num_rows, slot, TOKENS, ROWS, WARPS)
    begin = gl.load(control + row)
    n = gl.load(control + row + 1) - begin
    b = gl.load(control + 2 * control_stride + row)
    position = gl.load(control + 6 * control_stride + row)
    first = (slot - begin // TOKENS - row) * TOKENS
    if first < n:
        end = gl.where(b >= 0, position + gl.minimum(first + TOKENS, n), 0)
        num_keys = position + n
        num_blocks = (end + BLOCK_N - 1) // BLOCK_N

        k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_tiles.layout)
        v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DV], v_tiles.layout)
        q_s = gl.allocate_shared_memory(dtype, [BLOCK_M, D], k_tiles.layout)
        bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(bars.index(i), count=1)
        fence_async_shared()
        barrier()
        tiles = (k_tiles, v_tiles)
        buffers = (k_s, v_s, bars)
        columns = (i_kv * D, i_kv * DV)
        p_table = page_table + gl.maximum(b, 0).to(gl.int64) * table_stride
        # Of the keys of the next pair to copy, and of its values.
        page = _load_page(p_table, 0, num_blocks, BLOCK_N, PAGE)
        v_page = page
        for i in gl.static_range(STAGES):
            next_page = _load_page(p_table, i + 1, num_blocks, BLOCK_N, PAGE)
            _copy_pair(tiles, buffers, i, num_blocks, (page, v_page), columns, PAGE)
            v_page = page
            page = next_page
        load_queries(q_s, q, q_stride, begin, first, n, i_kv * GROUP, Q_HEAD, GROUP, WARPS)
        fence_async_shared()
        barrier()

        q_m = position + first + gl.arange(0, BLOCK_M, layout=down_s) // GROUP
        o_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, mma_s))
        no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, mma_s)
        acc = gl.zeros([BLOCK_M, DV], gl.float32, mma_o)
        m = gl.zeros([BLOCK_M], gl.float32, down_s)
        total = gl.zeros([BLOCK_M], gl.float32, down_s)
        if num_blocks > 0:
            mbarrier.wait(bars.index(0), 0)
            s = warpgroup_mma(q_s, k_s.index(0).permute((1, 0)), no_scores, use_acc=False)
            s = gl.where(o_n[None, :] <= q_m[:, None], s, float("-inf"))
            # Each query sees key 0.
            m, p, total = _soften(s, gl.full([BLOCK_M], float("-inf"), gl.float32, down_s), C, dtype)
            p_left = gl.convert_layout(p, left)
            barrier()
            next_page = _load_page(p_table, STAGES + 1, num_blocks, BLOCK_N, PAGE)
            _copy_pair(tiles, buffers, STAGES, num_blocks, (page, v_page), columns, PAGE)
            for step in range(1, num_blocks):
                stage = step % STAGES
                mbarrier.wait(bars.index(stage), step // STAGES % 2)
                s = warpgroup_mma(q_s, k_s.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
                acc = warpgroup_mma(p_left, v_s.index(stage), acc, is_async=True)
                v_page = page
                page = next_page
                next_page = _load_page(p_table, step + STAGES + 1, num_blocks, BLOCK_N, PAGE)
                s = warpgroup_mma_wait(1, deps=[s])
                # In branches: an assembler may wait for P V as early as in the block where that is asked for, before
                # the exponentials that should run beside it.
                if step * BLOCK_N + BLOCK_N > position + first:
                    s = gl.where((step * BLOCK_N + o_n)[None, :] <= q_m[:, None], s, float("-inf"))
                    new_m, p, added = _soften(s, m, C, dtype)
                else:
                    new_m, p, added = _soften(s, m, C, dtype)
                decay = gl.exp2(m - new_m)
                total = total * decay + added
                m = new_m
                next_left = gl.convert_layout(p, left)
                acc, p_left = warpgroup_mma_wait(0, deps=[acc, p_left])
                acc = acc * gl.convert_layout(decay, down_o)[:, None]
                p_left = next_left
                barrier()
                _copy_pair(tiles, buffers, step + STAGES, num_blocks, (page, v_page), columns, PAGE)
            stage = num_blocks % STAGES
            mbarrier.wait(bars.index(stage), num_blocks // STAGES % 2)
            if num_blocks * BLOCK_N > num_keys:
                clear_rows(v_s.index(stage), num_keys - (num_blocks - 1) * BLOCK_N, WARPS)
            acc = warpgroup_mma(p_left, v_s.index(stage), acc, is_async=True)
            acc, p_left = warpgroup_mma_wait(0, deps=[acc, p_left])

        m, total = gl.convert_layout(m, down_o), gl.convert_layout(total, down_o)
        _finish(
            acc,
            m,
            total,
            begin,
            first,
            n,
            i_kv * GROUP,
            end > 0,
            sinks,
            gate,
            o,
            lse,
            GATE_ROW,
            GATE_HEAD,
            HAS_SINKS,
            HAS_GATE,
            HAS_LSE,
            HQ,
            GROUP,
            mma_o,
        )


def can_attend(queries: Queries, keys: Keys) -> bool:
    """Return whether `launch_attend` runs on this device with these sizes, a causal mask and no other modifier."""
    q, heads = queries.q, queries.heads
    if not on_hopper(q.device) or heads.key_dim not in HOPPER:
        return False
    block_m, block_n, _, _ = HOPPER[heads.key_dim]
    return (
        q.element_size() == 2
        and heads.value_dim == heads.key_dim
        and heads.group <= block_m
        and heads.scale > 0
        and keys.v is not None
        and keys.page_table is not None
        and keys.page_size >= block_n
        and keys.has_tiles
        and queries.is_only_causal
    )


def launch_attend(queries: Queries, keys: Keys, rows: Rows, o: Tensor, lse: Tensor | None) -> None:
    """Write the rows' outputs to o `[T, HQ, D]`, and to lse `[T, HQ]`."""
    q, heads, sinks, gate = queries.q, queries.heads, queries.sinks, queries.gate
    assert keys.page_table is not None and keys.v is not None
    block_m, block_n, stages, num_warps = HOPPER[heads.key_dim]
    tokens = block_m // heads.group
    max_length = min(rows.max_length, q.shape[0])
    num_slots = min(rows.num_rows * (max_length // tokens + 2), q.shape[0] // tokens + rows.num_rows)
    layout = gl.NVMMASharedLayout(128, 16, 2)

    def tiles(pages: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(pages.flatten(0, 1).flatten(1), [block_n, heads.key_dim], layout)

    attend_long_kernel[(num_slots * heads.num_keys,)](
        q,
        tiles(keys.k),
        tiles(keys.v),
        keys.page_table,
        rows.control,
        q if sinks is None else sinks,
        q if gate is None else gate,
        o,
        q if lse is None else lse,
        q.stride(0),
        rows.control.stride(0),
        keys.page_table.stride(0),
        rows.num_rows,
        num_slots,
        C=heads.scale * LOG2_E,
        HQ=heads.num_queries,
        HKV=heads.num_keys,
        D=heads.key_dim,
        DV=heads.value_dim,
        Q_HEAD=q.stride(1),
        GATE_ROW=0 if gate is None else gate.stride(0),
        GATE_HEAD=0 if gate is None else gate.stride(1),
        HAS_SINKS=sinks is not None,
        HAS_GATE=gate is not None,
        HAS_LSE=lse is not None,
        PAGE=keys.page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        ROWS=max(FEW_ROWS, pow2(rows.num_rows)),
        STAGES=stages,
        WARPS=num_warps,
        num_warps=num_warps,
    )
