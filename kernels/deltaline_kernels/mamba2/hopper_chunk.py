"""The walk of chunk.py for Hopper, in Gluon: the same steps, each begun before it is waited for.

The tiles of the chunk after the next are on their way while a chunk is computed, and the warps turn C B^T into scores
while the matrix unit is at the products with the state. Only for sizes that fit: S of 64 or 128, P a multiple of 64,
rows of xBC at multiples of 16 bytes.
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
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltaline_kernels.device.hopper import barrier, copy_rest
from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.mamba2.plan import BLOCK_P, CHUNK
from deltaline_kernels.rows import Rows, StateLines

WARPS = 4
# Chunks whose tiles are in shared memory or on their way: more leave no room for two programs on a multiprocessor.
STAGES = 2
STATE_DIMS = (64, 128)


@gluon.jit
def _copy_chunk(tiles, buffers, p_steps, stage, i_t, columns, is_here, CHUNK: gl.constexpr):
    """Begin to copy a chunk's B, C, x (`tiles`) and steps to `buffers`, if it is there."""
    s_tiles, x_tiles = tiles
    b_s, c_s, x_s, f_s, bars = buffers
    column_b, column_c, column_x = columns
    BYTES: gl.constexpr = 2 * CHUNK * (2 * b_s.shape[2] + x_s.shape[2])
    bar = bars.index(stage)
    mbarrier.expect(bar, BYTES, pred=is_here)
    tma.async_copy_global_to_shared(s_tiles, [i_t, column_b], bar, b_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(s_tiles, [i_t, column_c], bar, c_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(x_tiles, [i_t, column_x], bar, x_s.index(stage), pred=is_here)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_f = gl.arange(0, 2 * CHUNK, layout=layout)
    async_copy.async_copy_global_to_shared(f_s.index(stage), p_steps + o_f, mask=(o_f >= 0) & is_here)
    async_copy.commit_group()


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(
    do_not_specialize=["control_stride", "num_parts", "part_length"],
    do_not_specialize_on_alignment=["control", "waypoints"],
)
def walk_kernel(
    xBC,
    x_tiles,
    s_tiles,
    y_tiles,
    steps,
    D,
    ends,
    lines,
    y,
    control,
    control_stride,
    num_parts,
    part_length,
    xBC_stride,
    waypoints,
    H: gl.constexpr,
    G: gl.constexpr,
    P: gl.constexpr,
    S: gl.constexpr,
    BLOCK_P: gl.constexpr,
    CHUNK: gl.constexpr,
    PADDING: gl.constexpr,
    HAS_D: gl.constexpr,
    LINE_SHIFT: gl.constexpr,
    APART: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Walk through the chunks of a row, or of a part of one, with some rows of a head's state."""
    RECORD: gl.constexpr = G * S + H * P + H
    BLOCKS: gl.constexpr = P // BLOCK_P
    END: gl.constexpr = 2 * P * S + PADDING
    STEPS: gl.constexpr = 2 * CHUNK
    dtype: gl.constexpr = x_tiles.dtype
    mma_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    mma_p: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_P, 16])
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, S, 16])
    left_p: gl.constexpr = gl.DotOperandLayout(0, mma_p, 2)
    left_s: gl.constexpr = gl.DotOperandLayout(0, mma_s, 2)
    down: gl.constexpr = gl.SliceLayout(1, mma_c)
    across: gl.constexpr = gl.SliceLayout(0, mma_c)

    state, written, drafts, line_stride, written_stride, draft_stride, half_stride = lines
    i_p = gl.program_id(0) % BLOCKS
    i_h = gl.program_id(0) // BLOCKS % H
    i_part = gl.program_id(0) // (BLOCKS * H) % num_parts
    i_row = gl.program_id(0) // (BLOCKS * H) // num_parts
    i_g = i_h // (H // G)
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
        b_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, S], s_tiles.layout)
        c_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, S], s_tiles.layout)
        x_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BLOCK_P], x_tiles.layout)
        f_s = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        h_s = gl.allocate_shared_memory(dtype, [BLOCK_P, S], s_tiles.layout)
        y_s = gl.allocate_shared_memory(dtype, [CHUNK, BLOCK_P], y_tiles.layout)
        bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(bars.index(i), count=1)
        fence_async_shared()
        barrier()
        tiles = (s_tiles, x_tiles)
        buffers = (b_s, c_s, x_s, f_s, bars)
        column_x = i_h * P + i_p * BLOCK_P
        columns = (H * P + i_g * S, H * P + (G + i_g) * S, column_x)
        first = begin + part_begin
        slot = (begin // CHUNK + i_row + part_begin // CHUNK) * H + i_h
        p_steps = steps + slot.to(gl.int64) * STEPS
        num_tokens = gl.where(live, gl.maximum(part_end - part_begin, 0), 0)
        num_chunks = num_tokens // CHUNK
        for i in gl.static_range(STAGES):
            _copy_chunk(tiles, buffers, p_steps + i * (H * STEPS), i, first + i * CHUNK, columns, i < num_chunks, CHUNK)

        o_s = gl.arange(0, S, layout=gl.SliceLayout(0, mma_s))
        o_p = i_p * BLOCK_P + gl.arange(0, BLOCK_P, layout=gl.SliceLayout(1, mma_s))
        o_h = o_p[:, None] * S + o_s[None, :]
        # The line, unless the row is in parts: then what the first walk kept of it, and the ends of the parts before.
        is_read = (read > 0) & (i_part == 0) & (part_end == n)
        p_start = state + (read - LINE_SHIFT) * line_stride + i_h.to(gl.int64) * (P * S) + o_h
        h = gl.load(p_start, mask=(o_h >= 0) & is_read, other=0.0).to(gl.float32)
        p_end = ends + (begin // part_length * H + i_h).to(gl.int64) * END
        is_kept = (i_part == 0) & (part_end < n)
        h += gl.load(p_end + P * S + o_h, mask=(o_h >= 0) & is_kept, other=0.0)
        for i in range(0, i_part):
            h = h * gl.exp2(gl.load(p_end + 2 * P * S)) + gl.load(p_end + o_h)
            p_end = ends + ((begin + (i + 1) * part_length) // part_length * H + i_h).to(gl.int64) * END
        p_draft = drafts + (read - LINE_SHIFT) * draft_stride + half * half_stride
        for _ in range(0, gl.where(is_read, replayed, 0)):
            draft_b = gl.load(p_draft + i_g * S + o_s)
            draft_u = gl.load(p_draft + G * S + i_h * P + o_p)
            h = h * gl.exp(gl.load(p_draft + G * S + H * P + i_h)) + draft_u[:, None] * draft_b[None, :]
            p_draft += RECORD

        skip = 0.0
        if HAS_D:
            skip = gl.load(D + i_h).to(gl.float32)
        seen = gl.arange(0, CHUNK, layout=down)[:, None] >= gl.arange(0, CHUNK, layout=across)[None, :]
        zero = gl.zeros([CHUNK, CHUNK], gl.float32, mma_c)
        nothing = gl.zeros([CHUNK, BLOCK_P], gl.float32, mma_p)
        g_last = gl.load(p_steps + CHUNK - 1, mask=num_chunks > 0, other=0.0)
        if waypoints is not None:
            p_line = waypoints + begin // CHUNK + i_row + part_begin // CHUNK
            line = gl.load(p_line, mask=num_chunks > 0, other=0)
        for c in range(0, num_chunks):
            stage = c % STAGES
            # Before a product is begun: the assembler waits for all that are on their way where the sum of one is used.
            h_s.store(h.to(dtype))
            h = h * gl.exp2(g_last)
            fence_async_shared()
            async_copy.wait_group(STAGES - 1)
            # The last chunk's outputs have left y_s.
            tma.store_wait(0)
            barrier()
            mbarrier.wait(bars.index(stage), c // STAGES % 2)
            cb = warpgroup_mma(c_s.index(stage), b_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            out = warpgroup_mma(c_s.index(stage), h_s.permute((1, 0)), nothing, use_acc=False, is_async=True)
            factor = f_s.index(stage)
            p_steps += H * STEPS
            g_next = gl.load(p_steps + CHUNK - 1, mask=c + 1 < num_chunks, other=0.0)
            if waypoints is not None:
                next_line = gl.load(p_line + c + 1, mask=c + 1 < num_chunks, other=0)
            g_k = factor.slice(CHUNK, CHUNK).load(gl.SliceLayout(0, left_s))[None, :]
            x_left = x_s.index(stage).permute((1, 0)).load(left_s).to(gl.float32)
            x_left = (x_left * gl.exp2(g_last - g_k)).to(dtype)
            # What a product reads from registers is named where it is waited for: so it stays there until then.
            h = warpgroup_mma(x_left, b_s.index(stage), h, is_async=True)
            g_i = factor.slice(0, CHUNK).load(down)[:, None]
            g_j = factor.slice(CHUNK, CHUNK).load(across)[None, :]
            cb = warpgroup_mma_wait(2, deps=[cb])
            scores = gl.where(seen, cb * gl.exp2(g_i - g_j), 0.0)
            s_left = gl.convert_layout(scores.to(dtype), left_p)
            g_y = factor.slice(0, CHUNK).load(gl.SliceLayout(1, mma_p))[:, None]
            x = x_s.index(stage).load(mma_p).to(gl.float32) * skip
            out = warpgroup_mma_wait(1, deps=[out])
            out = warpgroup_mma(s_left, x_s.index(stage), out * gl.exp2(g_y) + x, is_async=True)
            out, s_left, h, x_left = warpgroup_mma_wait(0, deps=[out, s_left, h, x_left])
            y_s.store(out.to(dtype))
            fence_async_shared()
            barrier()
            tma.async_copy_shared_to_global(y_tiles, [first + c * CHUNK, column_x], y_s)
            if waypoints is not None:
                if line > 0:
                    p_kept = written + (line.to(gl.int64) - LINE_SHIFT) * written_stride
                    p_kept += i_h.to(gl.int64) * (P * S) + o_h
                    gl.store(p_kept, h.to(p_kept.dtype.element_ty))
                line = next_line
            g_last = g_next
            ahead = c + STAGES
            _copy_chunk(
                tiles,
                buffers,
                p_steps + (STAGES - 1) * (H * STEPS),
                stage,
                first + ahead * CHUNK,
                columns,
                ahead < num_chunks,
                CHUNK,
            )
        tma.store_wait(0)

        # The rest of the row, less than a chunk: the tokens behind it are another row's.
        rest = num_tokens - num_chunks * CHUNK
        if rest > 0:
            h_s.store(h.to(dtype))
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
            first += num_chunks * CHUNK
            p_token = xBC + first.to(gl.int64) * xBC_stride
            copy_rest(b_s.index(0), p_token + columns[0], xBC_stride, rest, layout)
            copy_rest(c_s.index(0), p_token + columns[1], xBC_stride, rest, layout)
            copy_rest(x_s.index(0), p_token + columns[2], xBC_stride, rest, layout)
            fence_async_shared()
            barrier()
            o_i, o_j = gl.arange(0, CHUNK, layout=down), gl.arange(0, CHUNK, layout=across)
            o_y = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, mma_p))
            o_k = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, left_s))
            g_end = gl.load(p_steps + CHUNK - 1)
            s = warpgroup_mma(c_s.index(0), b_s.index(0).permute((1, 0)), zero, use_acc=False)
            s = s * gl.exp2(gl.load(p_steps + o_i)[:, None] - gl.load(p_steps + CHUNK + o_j)[None, :])
            rest_left = gl.convert_layout(gl.where(seen, s, 0.0).to(dtype), left_p)
            p = warpgroup_mma(c_s.index(0), h_s.permute((1, 0)), nothing, use_acc=False)
            p = p * gl.exp2(gl.load(p_steps + o_y))[:, None] + x_s.index(0).load(mma_p).to(gl.float32) * skip
            p = warpgroup_mma(rest_left, x_s.index(0), p)
            weights = gl.exp2(g_end - gl.load(p_steps + CHUNK + o_k))[None, :]
            rest_x = (x_s.index(0).permute((1, 0)).load(left_s).to(gl.float32) * weights).to(dtype)
            h = warpgroup_mma(rest_x, b_s.index(0), h * gl.exp2(g_end))
            o_out = o_y[:, None] * (H * P) + gl.arange(0, BLOCK_P, layout=gl.SliceLayout(0, mma_p))[None, :]
            p_y = y + first.to(gl.int64) * (H * P) + column_x + o_out
            gl.store(p_y, p.to(dtype), mask=(o_y < rest)[:, None] & (o_out >= 0))
        if not live:
            o_y = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, mma_p))
            o_out = o_y[:, None] * (H * P) + gl.arange(0, BLOCK_P, layout=gl.SliceLayout(0, mma_p))[None, :]
            for done in range(part_begin, part_end, CHUNK):
                p_y = y + (begin + done).to(gl.int64) * (H * P) + column_x + o_out
                gl.store(p_y, nothing.to(dtype), mask=(done + o_y < part_end)[:, None] & (o_out >= 0))
        # An empty row changes its line only by a replay or by a move.
        if (part_end == n) & (write > 0) & ((n > 0) | (replayed > 0) | (write != read) | APART):
            barrier()
            p_new = written + (write - LINE_SHIFT) * written_stride + i_h.to(gl.int64) * (P * S) + o_h
            gl.store(p_new, h.to(p_new.dtype.element_ty))


def can_walk(inputs: MambaInputs, y: Tensor) -> bool:
    """Return whether `launch_walk` runs on this device with heads of this size, given that tiles are copied whole."""
    # Triton's interpreter has no Gluon.
    compiled = inputs.device.type != "cpu" and not triton.knobs.runtime.interpret
    fits = inputs.heads.state_dim in STATE_DIMS and y.dtype == inputs.xBC.dtype
    return fits and compiled and torch.cuda.get_device_capability(inputs.device)[0] == 9


def launch_walk(
    inputs: MambaInputs,
    lines: StateLines,
    rows: Rows,
    y: Tensor,
    steps: Tensor,
    ends: Tensor,
    plan: RowSplits,
    *,
    padding: int,
) -> None:
    """Walk through all rows; `ends` has what the first walk left of those in parts. Mutates `lines` and `y`."""
    xBC, heads = inputs.xBC, inputs.heads

    def tiles(tensor: Tensor, columns: int, stride: int, width: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(min(128, 2 * width), 16, 2)
        return TensorDescriptor(tensor, [tensor.shape[0], columns], [stride, 1], [CHUNK, width], layout)

    programs = rows.num_rows * plan.num_parts * heads.num_heads * (heads.head_dim // BLOCK_P)
    walk_kernel[(programs,)](
        xBC,
        tiles(xBC, heads.channels, xBC.stride(0), BLOCK_P),
        tiles(xBC, heads.channels, xBC.stride(0), heads.state_dim),
        tiles(y, heads.value_channels, heads.value_channels, BLOCK_P),
        steps,
        steps if inputs.D is None else inputs.D,
        ends,
        *lines.arguments(rows, y),
        plan.num_parts,
        plan.part_length,
        xBC.stride(0),
        rows.waypoints,
        **inputs.sizes,
        BLOCK_P=BLOCK_P,
        CHUNK=CHUNK,
        PADDING=padding,
        HAS_D=inputs.D is not None,
        **lines.constants,
        STAGES=STAGES,
        WARPS=WARPS,
        num_warps=WARPS,
    )
