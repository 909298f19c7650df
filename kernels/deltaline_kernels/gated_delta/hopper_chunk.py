"""The walk of chunk.py's `_advance` for Hopper, in Gluon: the same steps, each begun before it is waited for.

While the matrix unit computes a chunk's products with the state, the warps turn the last ones into scores and factors;
the next chunk's scores and T V are begun before this one's state is known. Only for sizes that fit: K of 64 or 128, V a
multiple of 64, rows of q, k and v at multiples of 16 bytes.
"""

import torch
import triton
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
from deltaline_kernels.device.hopper import barrier, copy_rest
from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.gated_delta.plan import BLOCK_V, CHUNK
from deltaline_kernels.gated_delta.transform import FACTORS
from deltaline_kernels.rows import Rows, StateLines

WARPS = 4
# Chunks whose tiles are in shared memory or on their way: more leave no room for two programs on a multiprocessor.
STAGES = 2
KEYS = (64, 128)


@gluon.jit
def _copy_chunk(
    tiles,
    buffers,
    factors,
    stage,
    i_t,
    i_slot,
    columns,
    is_here,
    CHUNK: gl.constexpr,
    FACTORS: gl.constexpr,
):
    """Begin to copy a chunk's k, q, v and T (`tiles`) and its factors to `buffers`, if it is there."""
    q_tiles, k_tiles, x_tiles, t_tiles = tiles
    k_s, q_s, x_s, t_s, f_s, bars = buffers
    column_qk, column_x = columns
    BYTES: gl.constexpr = 2 * CHUNK * (2 * k_s.shape[2] + x_s.shape[2] + CHUNK)
    bar = bars.index(stage)
    mbarrier.expect(bar, BYTES, pred=is_here)
    tma.async_copy_global_to_shared(k_tiles, [i_t, column_qk], bar, k_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(q_tiles, [i_t, column_qk], bar, q_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(x_tiles, [i_t, column_x], bar, x_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(t_tiles, [i_slot * CHUNK, 0], bar, t_s.index(stage), pred=is_here)
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    o_f = gl.arange(0, 4 * CHUNK, layout=layout)
    p_factor = factors + i_slot.to(gl.int64) * FACTORS + o_f
    async_copy.async_copy_global_to_shared(f_s.index(stage), p_factor, mask=(o_f >= 0) & is_here)
    async_copy.commit_group()


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(
    do_not_specialize=["control_stride", "num_parts", "part_length"],
    do_not_specialize_on_alignment=["control", "waypoints"],
)
def walk_kernel(
    strided,
    q_tiles,
    k_tiles,
    x_tiles,
    t_tiles,
    o_tiles,
    factors,
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
    FACTORS: gl.constexpr,
    LINE_SHIFT: gl.constexpr,
    APART: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Walk through the chunks of a row, or of a part of one, with a block of its state in registers."""
    # The scores' memory serves the outputs as well.
    gl.static_assert(BLOCK_V == CHUNK)
    RECORD: gl.constexpr = H * K + HV * V + HV
    BLOCKS: gl.constexpr = V // BLOCK_V
    END: gl.constexpr = (V + (K if K > V else V)) * K
    dtype: gl.constexpr = q_tiles.dtype
    mma_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    mma_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    left_c: gl.constexpr = gl.DotOperandLayout(0, mma_c, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, mma_k, 2)
    across: gl.constexpr = gl.SliceLayout(0, mma_c)
    down: gl.constexpr = gl.SliceLayout(1, mma_c)

    state, written, drafts, line_stride, written_stride, draft_stride, half_stride = lines
    q, k, v = strided[0]
    q_stride, k_stride, v_stride = strided[1]
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
    if (part_begin < n) | (i_part == 0):
        o_k = gl.arange(0, K, layout=gl.SliceLayout(0, mma_k))
        o_v = i_v * BLOCK_V + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, mma_k))
        o_h = o_v[:, None] * K + o_k[None, :]
        # The line, unless the row is in parts: then what stands before each of them.
        is_read = (read > 0) & (i_part == 0) & (part_end == n)
        p_start = state + (read - LINE_SHIFT) * line_stride + i_hv.to(gl.int64) * (V * K) + o_h
        h = gl.load(p_start, mask=(o_h >= 0) & is_read, other=0.0).to(gl.float32)
        p_end = ends + ((begin + part_begin) // part_length * HV + i_hv).to(gl.int64) * END + o_h
        p_end += gl.where(i_part == 0, V * K, -HV * END)
        h += gl.load(p_end, mask=(o_h >= 0) & ((i_part > 0) | (part_end < n)), other=0.0)
        p_draft = drafts + (read - LINE_SHIFT) * draft_stride + half * half_stride
        for _ in range(0, gl.where(is_read, replayed, 0)):
            draft_k = gl.load(p_draft + i_h * K + o_k)
            draft_u = gl.load(p_draft + H * K + i_hv * V + o_v)
            h = h * gl.exp(gl.load(p_draft + H * K + HV * V + i_hv)) + draft_u[:, None] * draft_k[None, :]
            p_draft += RECORD

        k_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], k_tiles.layout)
        q_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], q_tiles.layout)
        x_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BLOCK_V], x_tiles.layout)
        t_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], t_tiles.layout)
        f_s = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        bars = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
        # The scores and, once they were read, the outputs.
        s_s = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], t_tiles.layout)
        for i in gl.static_range(STAGES + 1):
            mbarrier.init(bars.index(i), count=1)
        fence_async_shared()
        barrier()
        tiles = (q_tiles, k_tiles, x_tiles, t_tiles)
        buffers = (k_s, q_s, x_s, t_s, f_s, bars)
        # v and the outputs have the same columns.
        columns = (i_h * K, i_hv * V + i_v * BLOCK_V)
        first = begin + part_begin
        slot = (begin // CHUNK + i_row + part_begin // CHUNK) * HV + i_hv
        num_tokens = gl.where(live, gl.maximum(part_end - part_begin, 0), 0)
        num_chunks = num_tokens // CHUNK
        for i in gl.static_range(STAGES):
            _copy_chunk(
                tiles,
                buffers,
                factors,
                i,
                first + i * CHUNK,
                slot + i * HV,
                columns,
                i < num_chunks,
                CHUNK,
                FACTORS,
            )
        seen = gl.arange(0, CHUNK, layout=down)[:, None] >= gl.arange(0, CHUNK, layout=across)[None, :]
        zero = gl.zeros([BLOCK_V, CHUNK], gl.float32, mma_c)
        scores, u = warpgroup_mma_init(zero), warpgroup_mma_init(zero)
        p_last = factors + 4 * CHUNK
        g_last = gl.load(p_last + slot.to(gl.int64) * FACTORS, mask=num_chunks > 0, other=0.0)
        if num_chunks > 0:
            mbarrier.wait(bars.index(0), 0)
            k_t, t_t = k_s.index(0).permute((1, 0)), t_s.index(0).permute((1, 0))
            scores = warpgroup_mma(q_s.index(0), k_t, zero, use_acc=False, is_async=True)
            u = warpgroup_mma(x_s.index(0).permute((1, 0)), t_t, zero, use_acc=False, is_async=True)
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
            factor = f_s.index(stage)
            g_i = factor.slice(0, CHUNK).load(down)[:, None]
            g_j = factor.slice(CHUNK, CHUNK).load(across)[None, :]
            factor_r = factor.slice(2 * CHUNK, CHUNK).load(across)[None, :]
            factor_o = factor.slice(3 * CHUNK, CHUNK).load(across)[None, :]
            p_next = p_last + (slot + (c + 1) * HV).to(gl.int64) * FACTORS
            g_next = gl.load(p_next, mask=c + 1 < num_chunks, other=0.0)
            if waypoints is not None:
                next_line = gl.load(p_line + c + 1, mask=c + 1 < num_chunks, other=0)
            scores = warpgroup_mma_wait(2, deps=[scores])
            exponents = gl.where(seen, g_i - g_j, float("-inf"))
            s_s.store((scores * gl.exp2(exponents)).to(dtype))
            fence_async_shared()
            r, u, left = warpgroup_mma_wait(0, deps=[r, u, left])
            r_left = gl.convert_layout((r * factor_r).to(dtype), left_c)
            u = warpgroup_mma(r_left, t_s.index(stage).permute((1, 0)), u, is_async=True)
            out = warpgroup_mma(left, q_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            h = h * gl.exp2(g_last)
            barrier()
            u, r_left = warpgroup_mma_wait(1, deps=[u, r_left])
            w_left = gl.convert_layout((u * gl.exp2(g_last - g_j)).to(dtype), left_k)
            h = warpgroup_mma(w_left, k_s.index(stage), h, is_async=True)
            u_left = gl.convert_layout(u.to(dtype), left_c)
            out, left = warpgroup_mma_wait(1, deps=[out, left])
            out = warpgroup_mma(u_left, s_s.permute((1, 0)), out * factor_o, is_async=True)
            # The next chunk's products without the state.
            then = (c + 1) % STAGES
            mbarrier.wait(bars.index(then), (c + 1) // STAGES % 2, pred=c + 1 < num_chunks)
            k_t, t_t = k_s.index(then).permute((1, 0)), t_s.index(then).permute((1, 0))
            scores = warpgroup_mma(q_s.index(then), k_t, zero, use_acc=False, is_async=True)
            u = warpgroup_mma(x_s.index(then).permute((1, 0)), t_t, zero, use_acc=False, is_async=True)
            h, w_left = warpgroup_mma_wait(3, deps=[h, w_left])
            out, u_left = warpgroup_mma_wait(2, deps=[out, u_left])
            barrier()
            s_s.permute((1, 0)).store(out.to(dtype))
            fence_async_shared()
            barrier()
            tma.async_copy_shared_to_global(o_tiles, [first + c * CHUNK, columns[1]], s_s)
            if waypoints is not None:
                if line > 0:
                    p_kept = written + (line.to(gl.int64) - LINE_SHIFT) * written_stride
                    p_kept += i_hv.to(gl.int64) * (V * K) + o_h
                    gl.store(p_kept, h.to(p_kept.dtype.element_ty))
                line = next_line
            g_last = g_next
            ahead = c + STAGES
            _copy_chunk(
                tiles,
                buffers,
                factors,
                stage,
                first + ahead * CHUNK,
                slot + ahead * HV,
                columns,
                ahead < num_chunks,
                CHUNK,
                FACTORS,
            )
        scores, u = warpgroup_mma_wait(0, deps=[scores, u])
        tma.store_wait(0)

        # The rest of the row, less than a chunk: the tokens behind it are another row's.
        rest = num_tokens - num_chunks * CHUNK
        if rest > 0:
            barrier()
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
            first += num_chunks * CHUNK
            slot += num_chunks * HV
            i_t = first.to(gl.int64)
            copy_rest(k_s.index(0), k + i_t * k_stride + columns[0], k_stride, rest, layout)
            copy_rest(q_s.index(0), q + i_t * q_stride + columns[0], q_stride, rest, layout)
            copy_rest(x_s.index(0), v + i_t * v_stride + columns[1], v_stride, rest, layout)
            bar = bars.index(STAGES)
            mbarrier.expect(bar, 2 * CHUNK * CHUNK)
            tma.async_copy_global_to_shared(t_tiles, [slot * CHUNK, 0], bar, t_s.index(0))
            p_factor = factors + slot.to(gl.int64) * FACTORS
            o_i, o_j = gl.arange(0, CHUNK, layout=down), gl.arange(0, CHUNK, layout=across)
            g_i, g_j = gl.load(p_factor + o_i)[:, None], gl.load(p_factor + CHUNK + o_j)[None, :]
            factor_r = gl.load(p_factor + 2 * CHUNK + o_j)[None, :]
            factor_o = gl.load(p_factor + 3 * CHUNK + o_j)[None, :]
            g_last = gl.load(p_factor + 4 * CHUNK)
            fence_async_shared()
            mbarrier.wait(bar, 0)
            barrier()
            k_t, t_t = k_s.index(0).permute((1, 0)), t_s.index(0).permute((1, 0))
            s = warpgroup_mma(q_s.index(0), k_t, zero, use_acc=False)
            exponents = gl.where(seen, g_i - g_j, float("-inf"))
            s_s.store((s * gl.exp2(exponents)).to(dtype))
            fence_async_shared()
            left = gl.convert_layout(h.to(dtype), left_c)
            updates = warpgroup_mma(x_s.index(0).permute((1, 0)), t_t, zero, use_acc=False)
            r = warpgroup_mma(left, k_t, zero, use_acc=False)
            updates = warpgroup_mma(gl.convert_layout((r * factor_r).to(dtype), left_c), t_t, updates)
            p = warpgroup_mma(left, q_s.index(0).permute((1, 0)), zero, use_acc=False)
            w_left = gl.convert_layout((updates * gl.exp2(g_last - g_j)).to(dtype), left_k)
            h = warpgroup_mma(w_left, k_s.index(0), h * gl.exp2(g_last))
            barrier()
            u_left = gl.convert_layout(updates.to(dtype), left_c)
            p = warpgroup_mma(u_left, s_s.permute((1, 0)), p * factor_o)
            o_out = gl.arange(0, BLOCK_V, layout=down)[:, None] + o_j[None, :] * (HV * V)
            p_o = o + i_t * (HV * V) + columns[1] + o_out
            gl.store(p_o, p.to(dtype), mask=(o_j < rest)[None, :] & (o_out >= 0))
        if not live:
            o_j = gl.arange(0, CHUNK, layout=across)
            o_out = gl.arange(0, BLOCK_V, layout=down)[:, None] + o_j[None, :] * (HV * V)
            for done in range(part_begin, part_end, CHUNK):
                p_o = o + (begin + done).to(gl.int64) * (HV * V) + columns[1] + o_out
                gl.store(p_o, zero.to(dtype), mask=(done + o_j < part_end)[None, :] & (o_out >= 0))
        # An empty row changes its line only by a replay or by a move.
        if (part_end == n) & (write > 0) & ((n > 0) | (replayed > 0) | (write != read) | APART):
            barrier()
            p_new = written + (write - LINE_SHIFT) * written_stride + i_hv.to(gl.int64) * (V * K) + o_h
            gl.store(p_new, h.to(p_new.dtype.element_ty))


def can_walk(inputs: DeltaInputs) -> bool:
    """Return whether `launch_walk` runs on this device with keys of this size, given that tiles are copied whole."""
    # Triton's interpreter has no Gluon.
    compiled = inputs.device.type != "cpu" and not triton.knobs.runtime.interpret
    return inputs.heads.key_dim in KEYS and compiled and torch.cuda.get_device_capability(inputs.device)[0] == 9


def launch_walk(
    inputs: DeltaInputs,
    lines: StateLines,
    rows: Rows,
    o: Tensor,
    transforms: Tensor,
    factors: Tensor,
    ends: Tensor,
    plan: RowSplits,
) -> None:
    """Walk through all rows; `ends` has what stands before their parts. Mutates `lines` and `o`."""
    heads = inputs.heads

    def tiles(matrix: Tensor, width: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(matrix, [CHUNK, width], gl.NVMMASharedLayout(min(128, 2 * width), 16, 2))

    programs = rows.num_rows * plan.num_parts * heads.num_value_heads * (heads.value_dim // BLOCK_V)
    walk_kernel[(programs,)](
        (inputs.tokens, inputs.strides),
        tiles(inputs.q, heads.key_dim),
        tiles(inputs.k, heads.key_dim),
        tiles(inputs.v, BLOCK_V),
        tiles(transforms.flatten(0, 2), CHUNK),
        tiles(o.flatten(1), BLOCK_V),
        factors,
        ends,
        *lines.arguments(rows, o),
        plan.num_parts,
        plan.part_length,
        rows.waypoints,
        **inputs.sizes,
        BLOCK_V=BLOCK_V,
        CHUNK=CHUNK,
        FACTORS=FACTORS,
        **lines.constants,
        STAGES=STAGES,
        WARPS=WARPS,
        num_warps=WARPS,
    )
