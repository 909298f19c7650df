"""The gated delta rule in chunks of 64 tokens, for long rows of 16-bit values, in Triton.

Within a chunk, with G_i = g_1 + .. + g_i and h the state before it:

    T = diag(beta) (I + tril(exp(G_i - G_j) k_i.k_j beta_j, -1))^-1
    U = T V - T (exp(G) K h^T)
    o = exp(G) Q h^T + tril(exp(G_i - G_j) q_i.k_j) U
    h = exp(G_C) h + U^T (exp(G_C - G_j) k_j)

T, the only matrix that crosses memory, is known for all chunks (transform.py). `_advance` walks through the chunks of a
row, or of a part of one, with a block of its state in registers. It computes the transpose of what stands
above: then each product's left operand is what the last one left in registers, and only k, q, T and the scores lie in
shared memory. q and k are used as they come: their norms are factors of rows and columns of the products.

A row in parts is walked twice, all parts at once. First each part finds what it makes of a state, h P + E: E is where
it ends from zero, P where it ends from the identity without values. `join_parts` puts what stands before a part in the
place of E of the part before it (the state that the row starts from has a place of its own); parts are walked again.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.delta_rule.parts import empty_ends, join_parts
from deltaline_kernels.device.hopper import has_room, is_aligned
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.replay import fold_drafts
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.waypoints import find_stop, find_waypoint, keep_state
from deltaline_kernels.gated_delta.hopper_chunk import can_walk, launch_walk
from deltaline_kernels.gated_delta.hopper_ends import launch_ends
from deltaline_kernels.gated_delta.plan import BLOCK_V, CHUNK, choose_plan
from deltaline_kernels.gated_delta.transform import FACTORS, SMALLEST_KEY, launch_transform
from deltaline_kernels.rows import Rows, StateLines

# Of a walk. With keys of 128 more stages leave no room for a second program on a multiprocessor.
WARPS, STAGES = 4, 2


@triton.jit
def _step(
    b_h,
    b_q,
    b_k,
    b_x,
    b_t,
    g_i,
    g_last,
    p_factor,
    eps,
    CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Return the state b_h `[V block, K]` after a chunk, and its outputs `[CHUNK, V block]`: not if ENDS are wanted."""
    dtype: tl.constexpr = b_k.dtype
    o_c = tl.arange(0, CHUNK)
    g_j = tl.load(p_factor + CHUNK + o_c)[None, :]
    factor_r = tl.load(p_factor + 2 * CHUNK + o_c)[None, :]
    b_hd = b_h.to(dtype)
    b_u = tl.dot(tl.trans(b_x), tl.trans(b_t))  # (V block, CHUNK)
    b_r = tl.dot(b_hd, tl.trans(b_k)) * factor_r
    b_u = tl.dot(b_r.to(dtype), tl.trans(b_t), acc=b_u)
    b_o = b_x
    if not ENDS:
        if NORMALIZE:
            b_wide = b_q.to(tl.float32)
            g_i -= 0.5 * tl.log2(tl.sum(b_wide * b_wide, axis=1) + eps)
        exponents = tl.where(o_c[:, None] >= o_c[None, :], g_i[:, None] - g_j, float("-inf"))
        b_scores = (tl.dot(b_q, tl.trans(b_k)) * tl.exp2(exponents)).to(dtype)
        b_turned = tl.dot(b_hd, tl.trans(b_q)) * tl.exp2(g_i)[None, :]
        b_o = tl.trans(tl.dot(b_u.to(dtype), tl.trans(b_scores), acc=b_turned)).to(dtype)
    b_w = (b_u * tl.exp2(g_last - g_j)).to(dtype)
    return tl.dot(b_w, b_k, acc=b_h * tl.exp2(g_last)), b_o


@triton.jit
def _walk_tiles(
    b_h,
    tiles,
    columns,
    factors,
    eps,
    slot,
    first_t,
    begin,
    end,
    HV: tl.constexpr,
    CHUNK: tl.constexpr,
    FACTORS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ENDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the state after the whole chunks from token `begin` to `end`, counted from first_t; store their outputs.

    tiles: of q, k, v, T and the outputs. columns: those of q and k, of v, and of the outputs.
    """
    q_tiles, k_tiles, x_tiles, t_tiles, o_tiles = tiles
    column_qk, column_x, column_o = columns
    o_c = tl.arange(0, CHUNK)
    # Loaded ahead by hand: in shared memory they would leave no room for a second program.
    p_ahead = factors + (slot + begin // CHUNK * HV) * FACTORS
    g_i = tl.load(p_ahead + o_c, mask=end > begin, other=0.0)
    g_last = tl.load(p_ahead + 4 * CHUNK, mask=end > begin, other=0.0)
    for done in tl.range(begin, end, CHUNK, num_stages=STAGES):
        p_ahead += HV * FACTORS
        next_g_i = tl.load(p_ahead + o_c, mask=done + CHUNK < end, other=0.0)
        next_g_last = tl.load(p_ahead + 4 * CHUNK, mask=done + CHUNK < end, other=0.0)
        i_t = (first_t + done).to(tl.int32)
        i_slot = (slot + done // CHUNK * HV).to(tl.int32)
        b_k = k_tiles.load([i_t, column_qk])
        b_q = b_k if ENDS else q_tiles.load([i_t, column_qk])
        b_x = x_tiles.load([i_t, column_x])
        b_t = t_tiles.load([i_slot * CHUNK, 0])
        p_factor = factors + (slot + done // CHUNK * HV) * FACTORS
        b_h, b_o = _step(b_h, b_q, b_k, b_x, b_t, g_i, g_last, p_factor, eps, CHUNK, NORMALIZE, ENDS)
        g_i, g_last = next_g_i, next_g_last
        if not ENDS:
            o_tiles.store([i_t, column_o], b_o)
    return b_h


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["control_stride", "num_parts", "part_length"],
    do_not_specialize_on_alignment=["control", "waypoints"],
)
def _advance(
    strided,
    q_tiles,
    k_tiles,
    x_tiles,
    t_tiles,
    o_tiles,
    factors,
    eps,
    ends,
    lines,
    o,
    control,
    control_stride,
    num_parts,
    part_length,
    waypoints,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    FACTORS: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    NORMALIZE: tl.constexpr,
    # Rows are in parts; this is their first walk, which finds their ends and no outputs; tiles are copied whole.
    PARTS: tl.constexpr,
    ENDS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = BLOCKS_V + ((K + BLOCK_V - 1) // BLOCK_V if ENDS else 0)
    END: tl.constexpr = (V + (K if K > V else V)) * K
    q, k, v = strided[0]
    q_stride, k_stride, v_stride = strided[1]
    i_v = tl.program_id(0) % BLOCKS
    i_hv = tl.program_id(0) // BLOCKS % HV
    i_part = tl.program_id(0) // (BLOCKS * HV) % num_parts
    i_row = tl.program_id(0) // (BLOCKS * HV) // num_parts
    i_h = i_hv // (HV // H)
    begin, n, read, write, _, replayed, half = load_row(control, control_stride, i_row)
    live = (read != -1) | (write != -1)
    part_begin = i_part * part_length
    part_end = tl.minimum(n, part_begin + part_length)
    is_last = part_end == n
    is_transition = i_v >= BLOCKS_V
    if ENDS:
        is_here = live & (part_end < n) & ((i_part > 0) | (i_v < BLOCKS_V))
    else:
        is_here = (part_begin < n) | (i_part == 0)
    if is_here:
        o_k = tl.arange(0, BLOCK_K)
        o_v = tl.where(is_transition, i_v - BLOCKS_V, i_v) * BLOCK_V + tl.arange(0, BLOCK_V)
        o_c = tl.arange(0, CHUNK)
        in_k = o_k < K
        in_v = (o_v < V) & (i_v < BLOCKS_V)
        in_h = in_v[:, None] & in_k[None, :]
        o_h = o_v[:, None] * K + o_k[None, :]
        starts_row = i_part == 0
        # Parts that are not the last of their rows are equally long: no two begin in the same stretch of that length.
        p_end = ends + ((begin + part_begin) // part_length * HV + i_hv) * END
        # Of a row in parts the first walk keeps the state that it starts from: the last part overwrites its line.
        is_read = (read > 0) & starts_row
        if PARTS and not ENDS:
            is_read = is_read & is_last
        p_start = find_state(lines, read - LINE_SHIFT, i_hv, V * K) + o_h
        b_h = tl.load(p_start, mask=in_h & is_read, other=0.0).to(tl.float32)
        p_drafts = find_drafts(lines, read - LINE_SHIFT, half)
        b_h = fold_drafts(b_h, p_drafts, tl.where(is_read, replayed, 0), i_h, i_hv, o_k, o_v, H, HV, K, V)
        if ENDS:
            tl.store(p_end + V * K + o_h, b_h, mask=in_h & starts_row)
            b_h = tl.where(is_transition & (o_v[:, None] == o_k[None, :]), 1.0, b_h)
        elif PARTS:
            p_before = p_end + tl.where(starts_row, V * K, -HV * END) + o_h
            b_h += tl.load(p_before, mask=in_h & ((i_part > 0) | (part_end < n)), other=0.0)

        num_tokens = tl.maximum(part_end - part_begin, 0)
        first_t = begin + part_begin
        slot = (begin // CHUNK + i_row + part_begin // CHUNK) * HV + i_hv
        # Columns behind the last one read as zero: the identity has no values.
        column_x = tl.where(is_transition, HV * V, i_hv * V + i_v * BLOCK_V)
        o_o = o_c[:, None] * (HV * V) + o_v[None, :]
        num_dead = tl.where(live, 0, num_tokens)
        num_whole = tl.where(live, num_tokens // CHUNK * CHUNK, 0) if TILES else 0
        if TILES:
            walked = (q_tiles, k_tiles, x_tiles, t_tiles, o_tiles)
            columns = (i_h * K, column_x, i_hv * V + i_v * BLOCK_V)
            if waypoints is None:
                b_h = _walk_tiles(
                    b_h,
                    walked,
                    columns,
                    factors,
                    eps,
                    slot,
                    first_t,
                    0,
                    num_whole,
                    HV,
                    CHUNK,
                    FACTORS,
                    NORMALIZE,
                    ENDS,
                    STAGES,
                )
            else:
                # From stop to stop: what is stored on the way would take shared memory beside that of the tiles.
                done = 0
                while done < num_whole:
                    stop, line = find_stop(waypoints, begin, n, i_row, part_begin + done, part_begin + num_whole)
                    stop -= part_begin
                    b_h = _walk_tiles(
                        b_h,
                        walked,
                        columns,
                        factors,
                        eps,
                        slot,
                        first_t,
                        done,
                        stop,
                        HV,
                        CHUNK,
                        FACTORS,
                        NORMALIZE,
                        ENDS,
                        STAGES,
                    )
                    keep_state(line, lines, b_h, o_h, in_h, i_hv, V * K, LINE_SHIFT, APART)
                    done = stop
        for done in tl.range(num_whole, num_tokens - num_dead, CHUNK, num_stages=1):
            in_t = done + o_c < num_tokens
            o_t = first_t + done + o_c[:, None]
            in_qk = in_t[:, None] & in_k[None, :]
            p_k = k + o_t * k_stride + i_h * K + o_k[None, :]
            b_k = tl.load(p_k, mask=in_qk, other=0.0)
            p_q = q + o_t * q_stride + i_h * K + o_k[None, :]
            b_q = b_k if ENDS else tl.load(p_q, mask=in_qk, other=0.0)
            p_x = v + o_t * v_stride + i_hv * V + o_v[None, :]
            b_x = tl.load(p_x, mask=in_t[:, None] & in_v[None, :], other=0.0)
            b_t = t_tiles.load([((slot + done // CHUNK * HV) * CHUNK).to(tl.int32), 0])
            p_factor = factors + (slot + done // CHUNK * HV) * FACTORS
            b_g = tl.load(p_factor + o_c)
            b_h, b_o = _step(
                b_h, b_q, b_k, b_x, b_t, b_g, tl.load(p_factor + 4 * CHUNK), p_factor, eps, CHUNK, NORMALIZE, ENDS
            )
            if not ENDS:
                p_o = o + ((first_t + done) * HV + i_hv) * V + o_o
                tl.store(p_o, b_o, mask=in_t[:, None] & in_v[None, :])
            if waypoints is not None:
                line = find_waypoint(waypoints, begin, n, i_row, part_begin + done + CHUNK)
                keep_state(line, lines, b_h, o_h, in_h, i_hv, V * K, LINE_SHIFT, APART)
        if not ENDS:
            for done in range(0, num_dead, CHUNK):
                in_o = (done + o_c < num_tokens)[:, None] & in_v[None, :]
                p_o = o + ((first_t + done) * HV + i_hv) * V + o_o
                tl.store(p_o, tl.zeros((CHUNK, BLOCK_V), o.dtype.element_ty), mask=in_o)

        if ENDS:
            p_first = p_end + tl.where(is_transition, V * K, 0)
            o_out = tl.where(is_transition, o_k[None, :] * K + o_v[:, None], o_h)
            tl.store(p_first + o_out, b_h, mask=(o_v < tl.where(is_transition, K, V))[:, None] & in_k[None, :])
        # An empty row changes its line only by a replay or by a move.
        elif is_last & (write > 0) & ((n > 0) | (replayed > 0) | is_elsewhere(read, write, APART)):
            p_new = find_written(lines, write - LINE_SHIFT, i_hv, V * K, APART) + o_h
            tl.debug_barrier()
            tl.store(p_new, b_h.to(p_new.dtype.element_ty), mask=in_h)


def launch_chunk(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Run `rows` of 16-bit values, none of which is a VERIFY, in chunks. Mutates `lines` and `o`."""
    if rows.num_rows == 0:
        return
    heads, num_tokens = inputs.heads, inputs.num_tokens
    num_heads, key_dim, value_dim = heads.num_value_heads, heads.key_dim, heads.value_dim
    transforms, factors = launch_transform(inputs, rows)
    block_k = max(SMALLEST_KEY, triton.next_power_of_2(key_dim))
    plan = choose_plan(heads, rows.num_rows, num_tokens, rows.max_length)
    in_parts = plan.num_parts > 1
    ends = empty_ends(inputs, plan)
    tiles = key_dim == block_k and value_dim % BLOCK_V == 0 and all(map(is_aligned, (*inputs.tokens, o.flatten(1))))
    tiles = tiles and has_room(inputs.v, key_dim)

    def advance(blocks: int, *, ends_only: bool) -> None:
        q_tiles = k_tiles = x_tiles = o_tiles = None
        if tiles:
            q_tiles, k_tiles = (TensorDescriptor.from_tensor(x, [CHUNK, key_dim]) for x in (inputs.q, inputs.k))
            x_tiles, o_tiles = (TensorDescriptor.from_tensor(x, [CHUNK, BLOCK_V]) for x in (inputs.v, o.flatten(1)))
        t_tiles = TensorDescriptor(
            transforms, [transforms.shape[0] * num_heads * CHUNK, CHUNK], [CHUNK, 1], [CHUNK, CHUNK]
        )
        _advance[(rows.num_rows * plan.num_parts * num_heads * blocks,)](
            (inputs.tokens, inputs.strides),
            q_tiles,
            k_tiles,
            x_tiles,
            t_tiles,
            o_tiles,
            factors,
            heads.eps,
            ends,
            *lines.arguments(rows, o),
            plan.num_parts,
            plan.part_length,
            None if ends_only else rows.waypoints,
            **inputs.sizes,
            BLOCK_K=block_k,
            BLOCK_V=BLOCK_V,
            CHUNK=CHUNK,
            FACTORS=FACTORS,
            **lines.constants,
            NORMALIZE=inputs.normalize,
            PARTS=in_parts,
            ENDS=ends_only,
            TILES=tiles,
            STAGES=STAGES,
            num_warps=WARPS,
            num_stages=STAGES,
        )

    blocks = triton.cdiv(value_dim, BLOCK_V)
    on_hopper = tiles and can_walk(inputs)
    if in_parts:
        if on_hopper:
            launch_ends(inputs, lines, rows, o, transforms, factors, ends, plan)
        else:
            advance(blocks + triton.cdiv(key_dim, BLOCK_V), ends_only=True)
        join_parts(ends, inputs.heads, rows, plan)
    if on_hopper:
        launch_walk(inputs, lines, rows, o, transforms, factors, ends, plan)
    else:
        advance(blocks, ends_only=False)
