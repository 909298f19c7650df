"""How the walk of hopper_chunk.py goes through chunks with one block of a state, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from deltaline_kernels.device.hopper import barrier, copy_rest


@gluon.jit
def _load_start(
    lines,
    read,
    replayed,
    half,
    is_read,
    i_g,
    i_h,
    o_p,
    o_s,
    H: gl.constexpr,
    G: gl.constexpr,
    P: gl.constexpr,
    S: gl.constexpr,
    LINE_SHIFT: gl.constexpr,
):
    """Return the state `[o_p, o_s]` of a head in a row's line behind its replayed drafts, in fp32; zero if not read."""
    RECORD: gl.constexpr = G * S + H * P + H
    state, _, drafts, line_stride, _, draft_stride, half_stride = lines
    o_h = o_p[:, None] * S + o_s[None, :]
    p_state = state + (read - LINE_SHIFT) * line_stride + i_h.to(gl.int64) * (P * S) + o_h
    h = gl.load(p_state, mask=(o_h >= 0) & is_read, other=0.0).to(gl.float32)
    p_draft = drafts + (read - LINE_SHIFT) * draft_stride + half * half_stride
    for _ in range(0, gl.where(is_read, replayed, 0)):
        draft_b = gl.load(p_draft + i_g * S + o_s)
        draft_u = gl.load(p_draft + G * S + i_h * P + o_p)
        h = h * gl.exp(gl.load(p_draft + G * S + H * P + i_h)) + draft_u[:, None] * draft_b[None, :]
        p_draft += RECORD
    return h


@gluon.jit
def _copy_chunk(tiles, buffers, stage, i_t, columns, is_here):
    """Begin to copy a chunk's B, C and x (`tiles`) to `buffers`, if it is there."""
    s_tiles, x_tiles = tiles
    b_s, c_s, x_s, b_bars, c_bars, x_bars, _ = buffers
    column_b, column_c, column_x = columns
    S_BYTES: gl.constexpr = 2 * b_s.shape[1] * b_s.shape[2]
    b_bar, c_bar, x_bar = b_bars.index(stage), c_bars.index(stage), x_bars.index(stage)
    # With a barrier of its own for each, Triton lets no warps wait between the copies.
    mbarrier.expect(b_bar, S_BYTES, pred=is_here)
    mbarrier.expect(c_bar, S_BYTES, pred=is_here)
    mbarrier.expect(x_bar, 2 * x_s.shape[1] * x_s.shape[2], pred=is_here)
    tma.async_copy_global_to_shared(s_tiles, [i_t, column_b], b_bar, b_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(s_tiles, [i_t, column_c], c_bar, c_s.index(stage), pred=is_here)
    tma.async_copy_global_to_shared(x_tiles, [i_t, column_x], x_bar, x_s.index(stage), pred=is_here)


@gluon.jit
def walk_block(
    told,
    tiles,
    buffers,
    own,
    waypoints,
    SIDE: gl.constexpr,
    SIDES: gl.constexpr,
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
    """Walk with one of a program's blocks of states; the warps of the first copy what all have in common."""
    BLOCKS: gl.constexpr = P // BLOCK_P
    PROGRAMS: gl.constexpr = H * BLOCKS // SIDES
    END: gl.constexpr = 2 * P * S + PADDING
    STEPS: gl.constexpr = 2 * CHUNK
    xBC, y_tiles, steps, D, ends, lines, y, control, control_stride, cut, stride = told
    num_parts, part_length, ends_length = cut
    b_s, c_s, x_s, b_bars, c_bars, x_bars, free = buffers
    f_s, h_s, y_s, done = own
    dtype: gl.constexpr = b_s.dtype
    mma_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    mma_p: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_P, 16])
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, S, 16])
    left_p: gl.constexpr = gl.DotOperandLayout(0, mma_p, 2)
    left_s: gl.constexpr = gl.DotOperandLayout(0, mma_s, 2)
    down: gl.constexpr = gl.SliceLayout(1, mma_c)
    across: gl.constexpr = gl.SliceLayout(0, mma_c)

    _, written, _, _, written_stride, _, _ = lines
    i_block = gl.program_id(0) % PROGRAMS * SIDES + SIDE
    i_p = i_block % BLOCKS
    i_h = i_block // BLOCKS
    i_part = gl.program_id(0) // PROGRAMS % num_parts
    i_row = gl.program_id(0) // PROGRAMS // num_parts
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
        column_x = i_h * P + i_p * BLOCK_P
        columns = (H * P + i_g * S, H * P + (G + i_g) * S, column_x)
        first = begin + part_begin
        slot = (begin // CHUNK + i_row + part_begin // CHUNK) * H + i_h
        p_steps = steps + slot.to(gl.int64) * STEPS
        num_tokens = gl.where(live, gl.maximum(part_end - part_begin, 0), 0)
        num_chunks = num_tokens // CHUNK
        if SIDE == 0:
            for i in gl.static_range(STAGES):
                _copy_chunk(tiles, buffers, i, first + i * CHUNK, columns, i < num_chunks)

        o_s = gl.arange(0, S, layout=gl.SliceLayout(0, mma_s))
        o_p = i_p * BLOCK_P + gl.arange(0, BLOCK_P, layout=gl.SliceLayout(1, mma_s))
        o_h = o_p[:, None] * S + o_s[None, :]
        # The line, unless the row is in parts: then what the first walk kept of it, and the ends of what is before.
        is_read = (read > 0) & (i_part == 0) & (part_end == n)
        h = _load_start(lines, read, replayed, half, is_read, i_g, i_h, o_p, o_s, H, G, P, S, LINE_SHIFT)
        p_end = ends + (begin // ends_length * H + i_h).to(gl.int64) * END
        is_kept = (i_part == 0) & (part_end < n)
        h += gl.load(p_end + P * S + o_h, mask=(o_h >= 0) & is_kept, other=0.0)
        for i in range(0, part_begin // ends_length):
            h = h * gl.exp2(gl.load(p_end + 2 * P * S)) + gl.load(p_end + o_h)
            p_end = ends + ((begin + (i + 1) * ends_length) // ends_length * H + i_h).to(gl.int64) * END

        skip = 0.0
        if HAS_D:
            skip = gl.load(D + i_h).to(gl.float32)
        seen = gl.arange(0, CHUNK, layout=down)[:, None] >= gl.arange(0, CHUNK, layout=across)[None, :]
        zero = gl.zeros([CHUNK, CHUNK], gl.float32, mma_c)
        nothing = gl.zeros([CHUNK, BLOCK_P], gl.float32, mma_p)
        g_last = gl.load(p_steps + CHUNK - 1, mask=num_chunks > 0, other=0.0)
        # Steps come by registers: the fence behind the state would wait for what is on its way to shared memory.
        o_f = gl.arange(0, STEPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        f_s.index(2 * SIDE).store(gl.load(p_steps + o_f, mask=(o_f >= 0) & (num_chunks > 0), other=0.0))
        if waypoints is not None:
            p_line = waypoints + begin // CHUNK + i_row + part_begin // CHUNK
            line = gl.load(p_line, mask=num_chunks > 0, other=0)
        if SIDES == 1:
            # Begun a chunk ahead: beside a block alone little else keeps the matrix unit busy.
            cb = warpgroup_mma_init(zero)
            if num_chunks > 0:
                mbarrier.wait(b_bars.index(0), 0)
                mbarrier.wait(c_bars.index(0), 0)
                cb = warpgroup_mma(c_s.index(0), b_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        for c in range(0, num_chunks):
            stage, phase = c % STAGES, c // STAGES % 2
            x_tile = x_s.index(stage).slice(SIDE * BLOCK_P, BLOCK_P, 1)
            # Before a product is begun: the assembler waits for all that are on their way where the sum of one is used.
            h_s.store(h.to(dtype))
            h = h * gl.exp2(g_last)
            fence_async_shared()
            barrier()
            if SIDES > 1:
                mbarrier.wait(b_bars.index(stage), phase)
                mbarrier.wait(c_bars.index(stage), phase)
                b_right = b_s.index(stage).permute((1, 0))
                cb = warpgroup_mma(c_s.index(stage), b_right, zero, use_acc=False, is_async=True)
            out = warpgroup_mma(c_s.index(stage), h_s.permute((1, 0)), nothing, use_acc=False, is_async=True)
            factor = f_s.index(2 * SIDE + c % 2)
            p_steps += H * STEPS
            f_next = gl.load(p_steps + o_f, mask=(o_f >= 0) & (c + 1 < num_chunks), other=0.0)
            g_next = gl.load(p_steps + CHUNK - 1, mask=c + 1 < num_chunks, other=0.0)
            if waypoints is not None:
                next_line = gl.load(p_line + c + 1, mask=c + 1 < num_chunks, other=0)
            mbarrier.wait(x_bars.index(stage), phase)
            g_k = factor.slice(CHUNK, CHUNK).load(gl.SliceLayout(0, left_s))[None, :]
            x_left = x_tile.permute((1, 0)).load(left_s).to(gl.float32)
            x_left = (x_left * gl.exp2(g_last - g_k)).to(dtype)
            # What a product reads from registers is named where it is waited for: so it stays there until then.
            h = warpgroup_mma(x_left, b_s.index(stage), h, is_async=True)
            g_i = factor.slice(0, CHUNK).load(down)[:, None]
            g_j = factor.slice(CHUNK, CHUNK).load(across)[None, :]
            cb = warpgroup_mma_wait(2, deps=[cb])
            scores = gl.where(seen, cb * gl.exp2(g_i - g_j), 0.0)
            s_left = gl.convert_layout(scores.to(dtype), left_p)
            g_y = factor.slice(0, CHUNK).load(gl.SliceLayout(1, mma_p))[:, None]
            x = x_tile.load(mma_p).to(gl.float32) * skip
            out = warpgroup_mma_wait(1, deps=[out])
            out = warpgroup_mma(s_left, x_tile, out * gl.exp2(g_y) + x, is_async=True)
            if SIDES == 1:
                after, is_after, its_phase = (c + 1) % STAGES, c + 1 < num_chunks, (c + 1) // STAGES % 2
                mbarrier.wait(b_bars.index(after), its_phase, pred=is_after)
                mbarrier.wait(c_bars.index(after), its_phase, pred=is_after)
                b_right = b_s.index(after).permute((1, 0))
                cb = warpgroup_mma(c_s.index(after), b_right, zero, use_acc=False, is_async=True)
            # The last chunk's outputs have left y_s.
            tma.store_wait(0)
            barrier()
            out, s_left, h, x_left = warpgroup_mma_wait(1 if SIDES == 1 else 0, deps=[out, s_left, h, x_left])
            y_s.store(out.to(dtype))
            f_s.index(2 * SIDE + (c + 1) % 2).store(f_next)
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
            if SIDES == 1:
                ahead = c + STAGES
                _copy_chunk(tiles, buffers, stage, first + ahead * CHUNK, columns, ahead < num_chunks)
            else:
                mbarrier.arrive(free.index(stage), count=1)
                if SIDE == 0:
                    # In place of the chunk before, which the other warps have left by now, or soon.
                    ahead = c - 1 + STAGES
                    left, is_here = ahead % STAGES, (c > 0) & (ahead < num_chunks)
                    mbarrier.wait(free.index(left), (ahead // STAGES + 1) % 2, pred=is_here)
                    _copy_chunk(tiles, buffers, left, first + ahead * CHUNK, columns, is_here)
        if SIDES == 1:
            cb = warpgroup_mma_wait(0, deps=[cb])
        tma.store_wait(0)

        # The rest of the row, less than a chunk: the tokens behind it are another row's.
        rest = num_tokens - num_chunks * CHUNK
        if rest > 0:
            if SIDES > 1:
                # Its tiles take the places of chunks, which all warps have left then.
                mbarrier.arrive(done, count=1)
                mbarrier.wait(done, 0)
            h_s.store(h.to(dtype))
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
            first += num_chunks * CHUNK
            p_token = xBC + first.to(gl.int64) * stride
            x_rest = x_s.index(SIDE).slice(SIDE * BLOCK_P, BLOCK_P, 1)
            copy_rest(b_s.index(SIDE), p_token + columns[0], stride, rest, layout)
            copy_rest(c_s.index(SIDE), p_token + columns[1], stride, rest, layout)
            copy_rest(x_rest, p_token + columns[2], stride, rest, layout)
            fence_async_shared()
            barrier()
            o_i, o_j = gl.arange(0, CHUNK, layout=down), gl.arange(0, CHUNK, layout=across)
            o_y = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, mma_p))
            o_k = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, left_s))
            g_end = gl.load(p_steps + CHUNK - 1)
            s = warpgroup_mma(c_s.index(SIDE), b_s.index(SIDE).permute((1, 0)), zero, use_acc=False)
            s = s * gl.exp2(gl.load(p_steps + o_i)[:, None] - gl.load(p_steps + CHUNK + o_j)[None, :])
            rest_left = gl.convert_layout(gl.where(seen, s, 0.0).to(dtype), left_p)
            p = warpgroup_mma(c_s.index(SIDE), h_s.permute((1, 0)), nothing, use_acc=False)
            p = p * gl.exp2(gl.load(p_steps + o_y))[:, None] + x_rest.load(mma_p).to(gl.float32) * skip
            p = warpgroup_mma(rest_left, x_rest, p)
            weights = gl.exp2(g_end - gl.load(p_steps + CHUNK + o_k))[None, :]
            rest_x = (x_rest.permute((1, 0)).load(left_s).to(gl.float32) * weights).to(dtype)
            h = warpgroup_mma(rest_x, b_s.index(SIDE), h * gl.exp2(g_end))
            o_out = o_y[:, None] * (H * P) + gl.arange(0, BLOCK_P, layout=gl.SliceLayout(0, mma_p))[None, :]
            p_y = y + first.to(gl.int64) * (H * P) + column_x + o_out
            gl.store(p_y, p.to(dtype), mask=(o_y < rest)[:, None] & (o_out >= 0))
        if not live:
            o_y = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, mma_p))
            o_out = o_y[:, None] * (H * P) + gl.arange(0, BLOCK_P, layout=gl.SliceLayout(0, mma_p))[None, :]
            for skipped in range(part_begin, part_end, CHUNK):
                p_y = y + (begin + skipped).to(gl.int64) * (H * P) + column_x + o_out
                gl.store(p_y, nothing.to(dtype), mask=(skipped + o_y < part_end)[:, None] & (o_out >= 0))
        # An empty row changes its line only by a replay or by a move.
        if (part_end == n) & (write > 0) & ((n > 0) | (replayed > 0) | (write != read) | APART):
            barrier()
            p_new = written + (write - LINE_SHIFT) * written_stride + i_h.to(gl.int64) * (P * S) + o_h
            gl.store(p_new, h.to(p_new.dtype.element_ty))
