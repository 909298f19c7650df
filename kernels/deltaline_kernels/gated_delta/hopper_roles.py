"""What groups of warps do that walk through the chunks of a head together, in Gluon for Hopper.

Copies, the state, and outputs. They tell each other by barriers in shared memory: `full` and `empty` of the stages, of
what a chunk starts from (h), and of its updates (u).
"""

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

from deltaline_kernels.device.hopper import barrier, clear_rows


@gluon.jit
def copy_chunks(tiles, factors, buffers, full, empty, place, num_tokens, HV: gl.constexpr, FACTORS: gl.constexpr):
    """Copy the chunks' k, q, v, T and factors to shared memory, as their stages become free.

    Those of a chunk that is not whole are waited for at a barrier of its own, behind those of the stages.
    """
    q_tiles, k_tiles, x_tiles, t_tiles = tiles
    k_s, q_s, x_s, t_s, f_s = buffers
    first, slot, column_qk, column_x = place
    STAGES: gl.constexpr = k_s.shape[0]
    CHUNK: gl.constexpr = k_s.shape[1]
    BYTES: gl.constexpr = 2 * CHUNK * (2 * k_s.shape[2] + x_s.shape[2] + CHUNK)
    o_f = gl.arange(0, 4 * CHUNK, layout=gl.BlockedLayout([4], [32], [1], [0]))
    p_factor = factors + slot.to(gl.int64) * FACTORS + o_f
    before = full.index(0)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    for c in range(0, num_chunks):
        stage = c % STAGES
        bar = full.index(gl.where(num_tokens - c * CHUNK < CHUNK, STAGES, stage))
        i_t = first + c * CHUNK
        i_slot = slot + c * HV
        # What the stage had was read; the first time there was nothing.
        mbarrier.wait(empty.index(stage), (c // STAGES + 1) & 1)
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(k_tiles, [i_t, column_qk], bar, k_s.index(stage))
        tma.async_copy_global_to_shared(x_tiles, [i_t, column_x], bar, x_s.index(stage))
        tma.async_copy_global_to_shared(t_tiles, [i_slot * CHUNK, 0], bar, t_s.index(stage))
        tma.async_copy_global_to_shared(q_tiles, [i_t, column_qk], bar, q_s.index(stage))
        async_copy.async_copy_global_to_shared(f_s.index(stage), p_factor)
        async_copy.commit_group()
        p_factor += HV * FACTORS
        # The factors of the chunk before.
        async_copy.wait_group(1)
        barrier()
        mbarrier.arrive(before, count=1, pred=c > 0)
        before = bar
    async_copy.wait_group(0)
    barrier()
    mbarrier.arrive(before, count=1, pred=num_chunks > 0)


@gluon.jit
def advance_state(
    begun,
    i_half: gl.constexpr,
    KEEPS: gl.constexpr,
    HV: gl.constexpr,
    HALF: gl.constexpr,
    FACTORS: gl.constexpr,
):
    """Advance rows i_half * HALF .. of a head's state through the chunks, and leave what outputs are made of."""
    factors, buffers, shares, bars, place, num_chunks, start, parts, kept, final = begun
    k_s, _, x_s, t_s, f_s = buffers
    h_s, u_s = shares
    full, empty, h_full, h_empty, u_full, u_empty = bars
    STAGES: gl.constexpr = k_s.shape[0]
    CHUNK: gl.constexpr = k_s.shape[1]
    K: gl.constexpr = k_s.shape[2]
    dtype: gl.constexpr = k_s.dtype
    mma_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    mma_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left_c: gl.constexpr = gl.DotOperandLayout(0, mma_c, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, mma_k, 2)
    across: gl.constexpr = gl.SliceLayout(0, mma_c)
    p_state, is_read, p_draft, replayed, draft_at, draft_step = start
    p_before, is_part = parts
    table, line_at, num_whole, written, written_stride, state_at = kept
    p_final, is_final = final
    _, slot, _, _ = place

    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, mma_k))
    o_v = i_half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, mma_k))
    o_h = o_v[:, None] * K + o_k[None, :]
    h = gl.load(p_state + o_h, mask=(o_h >= 0) & is_read, other=0.0).to(gl.float32)
    h += gl.load(p_before + o_h, mask=(o_h >= 0) & is_part, other=0.0)
    draft_k_at, draft_u_at, draft_g_at = draft_at
    for _ in range(0, gl.where(is_read, replayed, 0)):
        draft_k = gl.load(p_draft + draft_k_at + o_k)
        draft_u = gl.load(p_draft + draft_u_at + o_v)
        h = h * gl.exp(gl.load(p_draft + draft_g_at)) + draft_u[:, None] * draft_k[None, :]
        p_draft += draft_step

    zero = gl.zeros([HALF, CHUNK], gl.float32, mma_c)
    p_last = factors + 4 * CHUNK
    g_last = gl.load(p_last + slot.to(gl.int64) * FACTORS, mask=num_chunks > 0, other=0.0)
    if KEEPS:
        p_line = table + line_at
        # What stands behind a whole chunk has a line; the entry behind the row's last tokens may say anything.
        line = gl.load(p_line, mask=num_whole > 0, other=0)
    for c in range(0, num_chunks):
        stage = c % STAGES
        turn = c & 1
        # What a product reads from registers is named where it is waited for: so it stays there until then.
        h_half = h.to(dtype)
        left = gl.convert_layout(h_half, left_c)
        mbarrier.wait(full.index(stage), c // STAGES & 1)
        r = warpgroup_mma(left, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        x_t = x_s.index(stage).slice(i_half * HALF, HALF, 1).permute((1, 0))
        t_t = t_s.index(stage).permute((1, 0))
        mbarrier.wait(h_empty, turn ^ 1)
        h_s.slice(i_half * HALF, HALF, 0).store(h_half)
        fence_async_shared()
        barrier()
        mbarrier.arrive(h_full, count=1)
        factor = f_s.index(stage)
        factor_r = factor.slice(2 * CHUNK, CHUNK).load(across)[None, :]
        p_next = p_last + (slot + (c + 1) * HV).to(gl.int64) * FACTORS
        g_next = gl.load(p_next, mask=c + 1 < num_chunks, other=0.0)
        if KEEPS:
            next_line = gl.load(p_line + c + 1, mask=c + 1 < num_whole, other=0)
        r, left = warpgroup_mma_wait(0, deps=[r, left])
        # Begun earlier, it would need registers that there are not.
        u = warpgroup_mma(x_t, t_t, zero, use_acc=False, is_async=True)
        r_left = gl.convert_layout((r * factor_r).to(dtype), left_c)
        u = warpgroup_mma(r_left, t_t, u, is_async=True)
        h = h * gl.exp2(g_last)
        g_j = factor.slice(CHUNK, CHUNK).load(across)[None, :]
        left_over = gl.exp2(g_last - g_j)
        u, r_left = warpgroup_mma_wait(0, deps=[u, r_left])
        w_left = gl.convert_layout((u * left_over).to(dtype), left_k)
        h = warpgroup_mma(w_left, k_s.index(stage), h, is_async=True)
        mbarrier.wait(u_empty, turn ^ 1)
        u_s.slice(i_half * HALF, HALF, 0).store(u.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(u_full, count=1)
        # The tiles of the chunk before were read by all four warps.
        mbarrier.arrive(empty.index((c + STAGES - 1) % STAGES), count=1, pred=c > 0)
        h, w_left = warpgroup_mma_wait(0, deps=[h, w_left])
        if KEEPS:
            if line > 0:
                p_kept = written + line.to(gl.int64) * written_stride + state_at + o_h
                gl.store(p_kept, h.to(p_kept.dtype.element_ty))
            line = next_line
        g_last = g_next
    if is_final:
        gl.store(p_final + o_h, h.to(p_final.dtype.element_ty))


@gluon.jit
def _hand_over(buffers, full, c, num_tokens):
    """Give a chunk that is not whole to all groups, with zeros for the tokens behind the row, which are another's."""
    k_s, _, x_s, _, _ = buffers
    STAGES: gl.constexpr = k_s.shape[0]
    CHUNK: gl.constexpr = k_s.shape[1]
    rest = num_tokens - c * CHUNK
    if (rest > 0) & (rest < CHUNK):
        mbarrier.wait(full.index(STAGES), 0)
        clear_rows(k_s.index(c % STAGES), rest, 4)
        clear_rows(x_s.index(c % STAGES), rest, 4)
        mbarrier.arrive(full.index(c % STAGES), count=2)


@gluon.jit
def make_outputs(
    o_tiles,
    o,
    buffers,
    shares,
    bars,
    place,
    num_tokens,
    eps,
    NORMALIZE: gl.constexpr,
    HV: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
):
    """Make the outputs of what the state's groups leave of each chunk, and divide them by the norms of its queries."""
    k_s, q_s, x_s, _, f_s = buffers
    h_s, u_s = shares
    full, empty, h_full, h_empty, u_full, u_empty = bars
    STAGES: gl.constexpr = k_s.shape[0]
    CHUNK: gl.constexpr = k_s.shape[1]
    dtype: gl.constexpr = k_s.dtype
    mma_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    mma_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    left_v: gl.constexpr = gl.DotOperandLayout(0, mma_v, 2)
    left_c: gl.constexpr = gl.DotOperandLayout(0, mma_c, 2)
    across: gl.constexpr = gl.SliceLayout(0, mma_c)
    down: gl.constexpr = gl.SliceLayout(1, mma_c)
    first, _, _, column_x = place
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    num_whole = num_tokens // CHUNK

    seen = gl.arange(0, CHUNK, layout=down)[:, None] >= gl.arange(0, CHUNK, layout=across)[None, :]
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, mma_c)
    zero_v = gl.zeros([CHUNK, BLOCK_V], gl.float32, mma_v)
    for c in range(0, num_chunks):
        stage = c % STAGES
        turn = c & 1
        _hand_over(buffers, full, c, num_tokens)
        mbarrier.wait(full.index(stage), c // STAGES & 1)
        query = q_s.index(stage).load(left_v)
        left = gl.convert_layout(query, left_c)
        scores = warpgroup_mma(left, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        factor = f_s.index(stage)
        g_i = factor.slice(0, CHUNK).load(down)[:, None]
        g_j = factor.slice(CHUNK, CHUNK).load(across)[None, :]
        factor_o = factor.slice(3 * CHUNK, CHUNK).load(gl.SliceLayout(1, mma_v))[:, None]
        exponents = gl.where(seen, g_i - g_j, float("-inf"))
        scores, query = warpgroup_mma_wait(0, deps=[scores, query])
        left = gl.convert_layout((scores * gl.exp2(exponents)).to(dtype), left_v)
        mbarrier.wait(h_full, turn)
        out = warpgroup_mma(query, h_s.permute((1, 0)), zero_v, use_acc=False, is_async=True)
        if NORMALIZE:
            wide = query.to(gl.float32)
            norm = gl.convert_layout(gl.rsqrt(gl.sum(wide * wide, 1) + eps), gl.SliceLayout(1, mma_v))[:, None]
        # The outputs before these have left the memory of their v.
        tma.store_wait(0)
        out, query = warpgroup_mma_wait(0, deps=[out, query])
        barrier()
        mbarrier.arrive(h_empty, count=1)
        mbarrier.arrive(empty.index((c + STAGES - 1) % STAGES), count=1, pred=c > 0)
        mbarrier.wait(u_full, turn)
        out = warpgroup_mma(left, u_s.permute((1, 0)), out * factor_o, is_async=True)
        out, left = warpgroup_mma_wait(0, deps=[out, left])
        if NORMALIZE:
            out = out * norm
        if c < num_whole:
            # Nobody reads v any longer.
            o_s = x_s.index(stage)
            o_s.store(out.to(dtype))
            fence_async_shared()
            barrier()
            tma.async_copy_shared_to_global(o_tiles, [first + c * CHUNK, column_x], o_s)
        else:
            barrier()
            o_i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, mma_v))[:, None]
            o_c = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, mma_v))[None, :]
            p_o = o + (first + c * CHUNK).to(gl.int64) * (HV * V) + column_x + o_i * (HV * V) + o_c
            gl.store(p_o, out.to(dtype), mask=(c * CHUNK + o_i < num_tokens) & (o_c >= 0))
        mbarrier.arrive(u_empty, count=1)
    tma.store_wait(0)
