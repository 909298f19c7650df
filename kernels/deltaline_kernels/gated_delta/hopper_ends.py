"""The first walk of rows in parts for Hopper, in Gluon: what each part makes of a state, and no outputs.

As chunk.py's `_advance` with ENDS. A program has 64 rows of E or of P, and few enough registers that three programs
run at once on a multiprocessor. Only for K of 64 or 128, V a multiple of 64, rows of k and v at multiples of 16 bytes.
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
    warpgroup_mma_wait,
)

from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.hopper import barrier, make_tiles
from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.gated_delta.plan import CHUNK
from deltaline_kernels.gated_delta.transform import FACTORS
from deltaline_kernels.rows import Rows, StateLines

WARPS, BLOCK_V = 4, 64
# Of these three programs have room.
STAGES, REGISTERS = 2, 168


@gluon.jit
def _copy_chunk(tiles, buffers, factors, stage, i_t, i_slot, columns, is_here, FACTORS: gl.constexpr):
    """Begin to copy a chunk's k, v, T and factors to `buffers`, if it is there."""
    k_tiles, x_tiles, t_tiles = tiles
    k_s, x_s, t_s, f_s, bars = buffers
    column_k, column_x = columns
    CHUNK: gl.constexpr = k_s.shape[1]
    BYTES: gl.constexpr = 2 * CHUNK * (k_s.shape[2] + x_s.shape[2] + CHUNK)
    bar = bars.index(stage)
    mbarrier.expect(bar, BYTES, pred=is_here)
    tma.async_copy_global_to_shared(k_tiles, [i_t, column_k], bar, k_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(x_tiles, [i_t, column_x], bar, x_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(t_tiles, [i_slot * CHUNK, 0], bar, t_s.index(stage), pred=is_here)
    # Of the columns: those of the scores, from whose last one the updates fade, and of K h^T.
    o_f = gl.arange(0, 2 * CHUNK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    p_factor = factors + i_slot.to(gl.int64) * FACTORS + CHUNK + o_f
    async_copy.async_copy_global_to_shared(f_s.index(stage), p_factor, mask=(o_f >= 0) & is_here)
    async_copy.commit_group()


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(do_not_specialize=["control_stride", "num_parts", "part_length"], do_not_specialize_on_alignment=["control"])
def ends_kernel(
    k_tiles,
    x_tiles,
    t_tiles,
    factors,
    ends,
    lines,
    control,
    control_stride,
    num_parts,
    part_length,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    CHUNK: gl.constexpr,
    FACTORS: gl.constexpr,
    LINE_SHIFT: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Find where a part ends from zero, or from the identity without values."""
    RECORD: gl.constexpr = H * K + HV * V + HV
    BLOCKS_V: gl.constexpr = V // BLOCK_V
    BLOCKS: gl.constexpr = BLOCKS_V + K // BLOCK_V
    END: gl.constexpr = (V + (K if K > V else V)) * K
    dtype: gl.constexpr = k_tiles.dtype
    mma_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    mma_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    left_c: gl.constexpr = gl.DotOperandLayout(0, mma_c, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, mma_k, 2)
    across: gl.constexpr = gl.SliceLayout(0, mma_c)
    state, _, drafts, line_stride, _, draft_stride, half_stride = lines
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
    part_begin = i_part * part_length
    is_transition = i_v >= BLOCKS_V
    if live & (part_begin + part_length < n) & ((i_part > 0) | (i_v < BLOCKS_V)):
        o_k = gl.arange(0, K, layout=gl.SliceLayout(0, mma_k))
        i_block = gl.where(is_transition, i_v - BLOCKS_V, i_v)
        o_v = i_block * BLOCK_V + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, mma_k))
        o_h = o_v[:, None] * K + o_k[None, :]
        # The state that the row starts from is kept here: the last part overwrites its line.
        is_read = (read > 0) & (i_part == 0)
        p_start = state + (read - LINE_SHIFT) * line_stride + i_hv.to(gl.int64) * (V * K) + o_h
        h = gl.load(p_start, mask=(o_h >= 0) & is_read, other=0.0).to(gl.float32)
        p_draft = drafts + (read - LINE_SHIFT) * draft_stride + half * half_stride
        for _ in range(0, gl.where(is_read, replayed, 0)):
            draft_k = gl.load(p_draft + i_h * K + o_k)
            draft_u = gl.load(p_draft + H * K + i_hv * V + o_v)
            h = h * gl.exp(gl.load(p_draft + H * K + HV * V + i_hv)) + draft_u[:, None] * draft_k[None, :]
            p_draft += RECORD
        # Parts that are not the last of their rows are equally long: no two begin in the same stretch of that length.
        p_end = ends + ((begin + part_begin) // part_length * HV + i_hv).to(gl.int64) * END
        gl.store(p_end + V * K + o_h, h, mask=(o_h >= 0) & (i_part == 0))
        h = gl.where(is_transition & (o_v[:, None] == o_k[None, :]), 1.0, h)

        k_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], k_tiles.layout)
        x_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BLOCK_V], x_tiles.layout)
        t_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], t_tiles.layout)
        f_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(bars.index(i), count=1)
        fence_async_shared()
        barrier()
        tiles = (k_tiles, x_tiles, t_tiles)
        buffers = (k_s, x_s, t_s, f_s, bars)
        # Columns behind the last one read as zero: the identity has no values.
        columns = (i_h * K, gl.where(is_transition, HV * V, i_hv * V + i_v * BLOCK_V))
        first = begin + part_begin
        slot = (begin // CHUNK + i_row + part_begin // CHUNK) * HV + i_hv
        num_chunks = part_length // CHUNK
        for i in gl.static_range(STAGES):
            _copy_chunk(tiles, buffers, factors, i, first + i * CHUNK, slot + i * HV, columns, i < num_chunks, FACTORS)
        zero = gl.zeros([BLOCK_V, CHUNK], gl.float32, mma_c)
        p_last = factors + 4 * CHUNK
        g_last = gl.load(p_last + slot.to(gl.int64) * FACTORS)
        for c in range(0, num_chunks):
            stage = c % STAGES
            # What a product reads from registers is named where it is waited for: so it stays there until then.
            left = gl.convert_layout(h.to(dtype), left_c)
            mbarrier.wait(bars.index(stage), c // STAGES & 1)
            r = warpgroup_mma(left, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            t_t = t_s.index(stage).permute((1, 0))
            async_copy.wait_group(STAGES - 1)
            barrier()
            factor = f_s.index(stage)
            factor_r = factor.slice(CHUNK, CHUNK).load(across)[None, :]
            g_next = gl.load(p_last + (slot + (c + 1) * HV).to(gl.int64) * FACTORS, mask=c + 1 < num_chunks, other=0.0)
            r, left = warpgroup_mma_wait(0, deps=[r, left])
            # Begun earlier, it would need registers that there are not.
            u = warpgroup_mma(x_s.index(stage).permute((1, 0)), t_t, zero, use_acc=False, is_async=True)
            r_left = gl.convert_layout((r * factor_r).to(dtype), left_c)
            u = warpgroup_mma(r_left, t_t, u, is_async=True)
            h = h * gl.exp2(g_last)
            left_over = gl.exp2(g_last - factor.slice(0, CHUNK).load(across)[None, :])
            u, r_left = warpgroup_mma_wait(0, deps=[u, r_left])
            w_left = gl.convert_layout((u * left_over).to(dtype), left_k)
            h = warpgroup_mma(w_left, k_s.index(stage), h, is_async=True)
            h, w_left = warpgroup_mma_wait(0, deps=[h, w_left])
            barrier()
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
                FACTORS,
            )
        async_copy.wait_group(0)
        o_turned = V * K + o_k[None, :] * K + o_v[:, None]
        gl.store(p_end + gl.where(is_transition, o_turned, o_h), h)


def launch_ends(
    inputs: DeltaInputs,
    lines: StateLines,
    rows: Rows,
    o: Tensor,
    transforms: Tensor,
    factors: Tensor,
    ends: Tensor,
    plan: RowSplits,
) -> None:
    """Find the ends of all parts but the last of each row, and what rows start from. Mutates `ends`."""
    heads = inputs.heads
    blocks = heads.value_dim // BLOCK_V + heads.key_dim // BLOCK_V
    where, _, control, control_stride = lines.arguments(rows, o)
    ends_kernel[(rows.num_rows * plan.num_parts * heads.num_value_heads * blocks,)](
        make_tiles(inputs.k, heads.key_dim, CHUNK),
        make_tiles(inputs.v, BLOCK_V, CHUNK),
        make_tiles(transforms.flatten(0, 2), CHUNK, CHUNK),
        factors,
        ends,
        where,
        control,
        control_stride,
        plan.num_parts,
        plan.part_length,
        **inputs.sizes,
        BLOCK_V=BLOCK_V,
        CHUNK=CHUNK,
        FACTORS=FACTORS,
        LINE_SHIFT=lines.shift,
        STAGES=STAGES,
        WARPS=WARPS,
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
