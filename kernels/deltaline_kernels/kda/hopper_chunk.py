"""The walk through the chunks of KDA for Hopper, in Gluon: chunk.py's steps, each begun before it is waited for.

A program walks through a row, or a part of one, with a block of its state in registers. It computes the transpose of
what chunk.py says, so that each product's left operand is what the last one left in registers. The next chunk's T V is
begun before this one's state is known. Only for sizes that fit: K of 64 or 128, V a multiple of 64, rows of v and
outputs at multiples of 16 bytes.

A row in parts is walked twice, all parts at once. First each part finds what it makes of a state, h P + E: E is where
it ends from zero, P where it ends from the identity without values. What `join_parts` makes of them is what stands
before the parts; from there they are walked again.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.hopper import barrier, copy_rest, is_aligned
from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.kda.plan import BLOCK_V, CHUNK, MANY_BLOCK_V, MANY_HEADS
from deltaline_kernels.kda.transform import Chunks
from deltaline_kernels.rows import Rows, StateLines

# Rows of the state that a warp has.
WARP_ROWS = 16
# Chunks whose tiles are in shared memory or on their way: in walks with outputs and without, of which two programs have
# room then, and in those of many heads, of which one has.
STAGES, ENDS_STAGES, MANY_STAGES = 3, 2, 2


@gluon.jit
def _copy_slot(
    tiles, buffers, total, stage, i_slot, is_here, CHUNK: gl.constexpr, ENDS: gl.constexpr, WARPS: gl.constexpr
):
    """Begin to copy a chunk's matrices and its total to `buffers`, if it is there."""
    q_tiles, k_tiles, r_tiles, s_tiles, t_tiles = tiles
    q_s, k_s, r_s, s_s, t_s, f_s, bars = buffers
    K: gl.constexpr = k_s.shape[2]
    bar = bars.index(stage)
    row = i_slot * CHUNK
    tma.async_copy_global_to_shared(k_tiles, [row, 0], bar, k_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(t_tiles, [row, 0], bar, t_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(r_tiles, [row, 0], bar, r_s.index(stage), pred=is_here)
    if not ENDS:
        tma.async_copy_global_to_shared(q_tiles, [row, 0], bar, q_s.index(stage), pred=is_here)
        tma.async_copy_global_to_shared(s_tiles, [row, 0], bar, s_s.index(stage), pred=is_here)
    o_f = gl.arange(0, K, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    p_total = total + i_slot.to(gl.int64) * K + o_f
    async_copy.async_copy_global_to_shared(f_s.index(stage), p_total, mask=(o_f >= 0) & is_here)
    async_copy.commit_group()


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(
    do_not_specialize=["control_stride", "num_parts", "part_length"],
    do_not_specialize_on_alignment=["control", "waypoints"],
)
def walk_kernel(
    q_tiles,
    k_tiles,
    r_tiles,
    s_tiles,
    t_tiles,
    x_tiles,
    o_tiles,
    untiled,
    ends,
    lines,
    o,
    control,
    control_stride,
    num_parts,
    part_length,
    waypoints,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    CHUNK: gl.constexpr,
    LINE_SHIFT: gl.constexpr,
    APART: gl.constexpr,
    # This is the first walk of rows in parts, which finds their ends and no outputs.
    ENDS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Walk through the chunks of a row, or of a part of one, with a block of its state in registers."""
    RECORD: gl.constexpr = H * K + HV * V + HV * K
    BLOCKS_V: gl.constexpr = V // BLOCK_V
    BLOCKS: gl.constexpr = BLOCKS_V + (K // BLOCK_V if ENDS else 0)
    END: gl.constexpr = (V + (K if K > V else V)) * K
    BYTES: gl.constexpr = 2 * CHUNK * ((2 if ENDS else 3) * K + BLOCK_V + (1 if ENDS else 2) * CHUNK)
    dtype: gl.constexpr = x_tiles.dtype
    mma_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    mma_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    left_c: gl.constexpr = gl.DotOperandLayout(0, mma_c, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, mma_k, 2)
    across: gl.constexpr = gl.SliceLayout(0, mma_c)
    down: gl.constexpr = gl.SliceLayout(1, mma_c)

    total, v, v_stride = untiled
    state, written, drafts, line_stride, written_stride, draft_stride, half_stride = lines
    i_v = gl.program_id(0) % BLOCKS
    i_hv = gl.program_id(0) // BLOCKS % HV
    i_part = gl.program_id(0) // (BLOCKS * HV) % num_parts
    i_row = gl.program_id(0) // (BLOCKS * HV) // num_parts
    i_h = i_hv // (HV // H)
    begin = gl.load(control + i_row)
    n = gl.load(control + i_row + 1) - begin
    read = gl.load(control + control_stride + i_row).to(gl.int64)
    write = gl.load(control + 2 * control_stride + i_row).to(gl.int64)
    replayed = gl.load(control + 4 * control_stride + i_row)
    half = gl.load(control + 5 * control_stride + i_row).to(gl.int64)
    live = (read != -1) | (write != -1)
    replayed = gl.where(read > 0, replayed, 0)
    part_begin = i_part * part_length
    part_end = gl.minimum(n, part_begin + part_length)
    is_transition = i_v >= BLOCKS_V
    if ENDS:
        is_here = live & (part_end < n) & ((i_part > 0) | (i_v < BLOCKS_V))
    else:
        is_here = (part_begin < n) | (i_part == 0)
    if is_here:
        o_k = gl.arange(0, K, layout=gl.SliceLayout(0, mma_k))
        i_block = gl.where(is_transition, i_v - BLOCKS_V, i_v)
        o_v = i_block * BLOCK_V + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, mma_k))
        o_h = o_v[:, None] * K + o_k[None, :]
        # The line, unless the row is in parts: then what stands before each of them. The first walk keeps that of the
        # first part, as the last part overwrites the line.
        is_read = (read > 0) & (i_part == 0)
        if not ENDS:
            is_read = is_read & (part_end == n)
        p_start = state + (read - LINE_SHIFT) * line_stride + i_hv.to(gl.int64) * (V * K) + o_h
        h = gl.load(p_start, mask=(o_h >= 0) & is_read, other=0.0).to(gl.float32)
        # Parts that are not the last of their rows are equally long: no two begin in the same stretch of that length.
        p_end = ends + ((begin + part_begin) // part_length * HV + i_hv).to(gl.int64) * END
        if not ENDS:
            p_before = p_end + gl.where(i_part == 0, V * K, -HV * END) + o_h
            h += gl.load(p_before, mask=(o_h >= 0) & ((i_part > 0) | (part_end < n)), other=0.0)
        p_draft = drafts + (read - LINE_SHIFT) * draft_stride + half * half_stride
        for _ in range(0, gl.where(is_read, replayed, 0)):
            draft_k = gl.load(p_draft + i_h * K + o_k)
            draft_u = gl.load(p_draft + H * K + i_hv * V + o_v)
            decay = gl.exp(gl.load(p_draft + H * K + HV * V + i_hv * K + o_k))
            h = h * decay[None, :] + draft_u[:, None] * draft_k[None, :]
            p_draft += RECORD
        if ENDS:
            gl.store(p_end + V * K + o_h, h, mask=(o_h >= 0) & (i_part == 0))
            h = gl.where(is_transition & (o_v[:, None] == o_k[None, :]), 1.0, h)

        k_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], k_tiles.layout)
        r_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], r_tiles.layout)
        t_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], t_tiles.layout)
        x_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BLOCK_V], x_tiles.layout)
        f_s = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        if ENDS:
            q_s, s_s, o_s = k_s, t_s, x_s.index(0)
        else:
            q_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], q_tiles.layout)
            s_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], s_tiles.layout)
            o_s = gl.allocate_shared_memory(dtype, [CHUNK, BLOCK_V], o_tiles.layout)
        bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(bars.index(i), count=1)
        fence_async_shared()
        barrier()
        tiles = (q_tiles, k_tiles, r_tiles, s_tiles, t_tiles)
        buffers = (q_s, k_s, r_s, s_s, t_s, f_s, bars)
        # Columns behind the last one read as zero: the identity has no values.
        column = gl.where(is_transition, HV * V, i_hv * V + i_v * BLOCK_V)
        first = begin + part_begin
        slot = (begin // CHUNK + i_row + part_begin // CHUNK) * HV + i_hv
        num_tokens = gl.where(live, gl.maximum(part_end - part_begin, 0), 0)
        num_chunks = num_tokens // CHUNK
        for i in gl.static_range(STAGES):
            is_there = i < num_chunks
            mbarrier.expect(bars.index(i), BYTES, pred=is_there)
            tma.async_copy_global_to_shared(
                x_tiles, [first + i * CHUNK, column], bars.index(i), x_s.index(i), pred=is_there
            )
            _copy_slot(tiles, buffers, total, i, slot + i * HV, is_there, CHUNK, ENDS, WARPS)
        zero = gl.zeros([BLOCK_V, CHUNK], gl.float32, mma_c)
        u = warpgroup_mma_init(zero)
        if num_chunks > 0:
            mbarrier.wait(bars.index(0), 0)
            x_t, t_t = x_s.index(0).permute((1, 0)), t_s.index(0).permute((1, 0))
            u = warpgroup_mma(x_t, t_t, zero, use_acc=False, is_async=True)
        if waypoints is not None:
            p_line = waypoints + begin // CHUNK + i_row + part_begin // CHUNK
            line = gl.load(p_line, mask=num_chunks > 0, other=0)
        for c in range(0, num_chunks):
            stage = c % STAGES
            # What a product reads from registers is named where it is waited for: so it stays there until then.
            left = gl.convert_layout(h.to(dtype), left_c)
            r = warpgroup_mma(left, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            async_copy.wait_group(STAGES - 1)
            tma.store_wait(0)
            barrier()
            h = h * f_s.index(stage).load(gl.SliceLayout(0, mma_k))[None, :]
            if waypoints is not None:
                next_line = gl.load(p_line + c + 1, mask=c + 1 < num_chunks, other=0)
            r, u, left = warpgroup_mma_wait(0, deps=[r, u, left])
            r_left = gl.convert_layout(r.to(dtype), left_c)
            u = warpgroup_mma(r_left, t_s.index(stage).permute((1, 0)), u, is_async=True)
            if ENDS:
                u, r_left = warpgroup_mma_wait(0, deps=[u, r_left])
            else:
                out = warpgroup_mma(left, q_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                u, r_left = warpgroup_mma_wait(1, deps=[u, r_left])
            u_left = gl.convert_layout(u.to(dtype), left_k)
            h = warpgroup_mma(u_left, r_s.index(stage), h, is_async=True)
            if not ENDS:
                u_last = gl.convert_layout(u.to(dtype), left_c)
                out, left = warpgroup_mma_wait(1, deps=[out, left])
                out = warpgroup_mma(u_last, s_s.index(stage).permute((1, 0)), out, is_async=True)
            # The next chunk's product without the state.
            then = (c + 1) % STAGES
            mbarrier.wait(bars.index(then), (c + 1) // STAGES % 2, pred=c + 1 < num_chunks)
            x_t, t_t = x_s.index(then).permute((1, 0)), t_s.index(then).permute((1, 0))
            u = warpgroup_mma(x_t, t_t, zero, use_acc=False, is_async=True)
            if ENDS:
                h, u_left = warpgroup_mma_wait(1, deps=[h, u_left])
            else:
                h, u_left = warpgroup_mma_wait(2, deps=[h, u_left])
                out, u_last = warpgroup_mma_wait(1, deps=[out, u_last])
                o_s.permute((1, 0)).store(out.to(dtype))
                fence_async_shared()
            barrier()
            if not ENDS:
                tma.async_copy_shared_to_global(o_tiles, [first + c * CHUNK, column], o_s)
            if waypoints is not None:
                if line > 0:
                    p_kept = written + (line.to(gl.int64) - LINE_SHIFT) * written_stride
                    p_kept += i_hv.to(gl.int64) * (V * K) + o_h
                    gl.store(p_kept, h.to(p_kept.dtype.element_ty))
                line = next_line
            ahead = c + STAGES
            is_there = ahead < num_chunks
            mbarrier.expect(bars.index(stage), BYTES, pred=is_there)
            tma.async_copy_global_to_shared(
                x_tiles, [first + ahead * CHUNK, column], bars.index(stage), x_s.index(stage), pred=is_there
            )
            _copy_slot(tiles, buffers, total, stage, slot + ahead * HV, is_there, CHUNK, ENDS, WARPS)
        u = warpgroup_mma_wait(0, deps=[u])
        tma.store_wait(0)
        async_copy.wait_group(0)

        if not ENDS:
            # The rest of the row, less than a chunk: the tokens behind it are another row's.
            rest = num_tokens - num_chunks * CHUNK
            if rest > 0:
                barrier()
                layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
                i_t = (first + num_chunks * CHUNK).to(gl.int64)
                stage = num_chunks % STAGES
                copy_rest(x_s.index(stage), v + i_t * v_stride + column, v_stride, rest, layout)
                mbarrier.expect(bars.index(stage), BYTES - 2 * CHUNK * BLOCK_V)
                _copy_slot(tiles, buffers, total, stage, slot + num_chunks * HV, rest > 0, CHUNK, ENDS, WARPS)
                async_copy.wait_group(0)
                fence_async_shared()
                mbarrier.wait(bars.index(stage), num_chunks // STAGES % 2)
                barrier()
                t_t = t_s.index(stage).permute((1, 0))
                updates = warpgroup_mma(x_s.index(stage).permute((1, 0)), t_t, zero, use_acc=False)
                left = gl.convert_layout(h.to(dtype), left_c)
                r = warpgroup_mma(left, k_s.index(stage).permute((1, 0)), zero, use_acc=False)
                updates = warpgroup_mma(gl.convert_layout(r.to(dtype), left_c), t_t, updates)
                p = warpgroup_mma(left, q_s.index(stage).permute((1, 0)), zero, use_acc=False)
                u_last = gl.convert_layout(updates.to(dtype), left_c)
                p = warpgroup_mma(u_last, s_s.index(stage).permute((1, 0)), p)
                h = h * f_s.index(stage).load(gl.SliceLayout(0, mma_k))[None, :]
                h = warpgroup_mma(gl.convert_layout(updates.to(dtype), left_k), r_s.index(stage), h)
                o_j = gl.arange(0, CHUNK, layout=across)
                o_out = gl.arange(0, BLOCK_V, layout=down)[:, None] + o_j[None, :] * (HV * V)
                p_o = o + i_t * (HV * V) + column + o_out
                gl.store(p_o, p.to(dtype), mask=(o_j < rest)[None, :] & (o_out >= 0))
            if not live:
                o_j = gl.arange(0, CHUNK, layout=across)
                o_out = gl.arange(0, BLOCK_V, layout=down)[:, None] + o_j[None, :] * (HV * V)
                for done in range(part_begin, part_end, CHUNK):
                    p_o = o + (begin + done).to(gl.int64) * (HV * V) + column + o_out
                    gl.store(p_o, zero.to(dtype), mask=(done + o_j < part_end)[None, :] & (o_out >= 0))
            # An empty row changes its line only by a replay or by a move.
            if (part_end == n) & (write > 0) & ((n > 0) | (replayed > 0) | (write != read) | APART):
                barrier()
                p_new = written + (write - LINE_SHIFT) * written_stride + i_hv.to(gl.int64) * (V * K) + o_h
                gl.store(p_new, h.to(p_new.dtype.element_ty))
        else:
            o_turned = V * K + o_k[None, :] * K + o_v[:, None]
            gl.store(p_end + gl.where(is_transition, o_turned, o_h), h)


def fits_walk(inputs: DeltaInputs, o: Tensor) -> bool:
    """Return whether `launch_walk` has heads of so many values, and copies v and o in tiles where they lie."""
    return inputs.heads.value_dim % BLOCK_V == 0 and is_aligned(inputs.v) and is_aligned(o)


def launch_walk(
    inputs: DeltaInputs,
    lines: StateLines,
    rows: Rows,
    o: Tensor,
    chunks: Chunks,
    ends: Tensor,
    plan: RowSplits,
    *,
    ends_only: bool,
) -> None:
    """Walk through all rows; `ends` has what stands before their parts. Mutates `lines` and `o`.

    ends_only: find the ends of parts instead. Mutates `ends`.
    """
    heads = inputs.heads

    def tiles(matrix: Tensor, width: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(matrix, [CHUNK, width], gl.NVMMASharedLayout(min(128, 2 * width), 16, 2))

    block_v, stages = BLOCK_V, ENDS_STAGES if ends_only else STAGES
    is_many = rows.num_rows * heads.num_value_heads >= MANY_HEADS
    if is_many and plan.num_parts == 1 and heads.value_dim % MANY_BLOCK_V == 0:
        block_v, stages = MANY_BLOCK_V, MANY_STAGES
    blocks = heads.value_dim // block_v + (heads.key_dim // block_v if ends_only else 0)
    walk_kernel[(rows.num_rows * plan.num_parts * heads.num_value_heads * blocks,)](
        *(tiles(matrix.flatten(0, 2), heads.key_dim) for matrix in (chunks.queries, chunks.keys, chunks.rests)),
        *(tiles(matrix.flatten(0, 2), CHUNK) for matrix in (chunks.scores, chunks.transforms)),
        tiles(inputs.v, block_v),
        tiles(o.flatten(1), block_v),
        (chunks.total, inputs.v, inputs.v.stride(0)),
        ends,
        *lines.arguments(rows, o),
        plan.num_parts,
        plan.part_length,
        None if ends_only else rows.waypoints,
        **inputs.sizes,
        BLOCK_V=block_v,
        CHUNK=CHUNK,
        **lines.constants,
        ENDS=ends_only,
        STAGES=stages,
        WARPS=block_v // WARP_ROWS,
        num_warps=block_v // WARP_ROWS,
    )
