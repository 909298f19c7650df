"""The Mamba2 recurrence (SSD) in chunks of 64 tokens, for long rows of 16-bit values, in Triton.

Within a chunk, with G_i = g_1 + .. + g_i, d the time steps and h the state before it:

    y = exp(G) C h^T + tril(exp(G_i - G_j) d_j C_i.B_j) X + D X
    h = exp(G_C) h + (exp(G_C - G_j) d_j x_j)^T B

G and d cross memory (steps.py); `_walk` goes through the chunks of a row, or of a part of one, with a block of one
head's state in registers. C B^T is the same for all heads of a group, yet each program computes it: it is a quarter of
the products, and read from memory it would be as many bytes as x.

A row in parts is walked twice, all parts at once. First each part but the last finds where it ends, E, and by how much
the state decays on the way, d: from the state that the row starts from in its first part, from zero in the others. Then
a part starts from what these make of each other, E_i + d_i (E_i-1 + d_i-1 (..)). There are fewer parts than programs
that run at once, since the last has no end to be found; so the first walk cuts them once more, into pieces.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltaline_kernels.device.hopper import has_room, is_aligned
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.replay import fold_drafts
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.waypoints import find_stop, find_waypoint, keep_state
from deltaline_kernels.mamba2.hopper_chunk import can_walk, launch_walk
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.mamba2.plan import BLOCK_P, CHUNK, choose_pieces, choose_plan
from deltaline_kernels.mamba2.steps import launch_steps
from deltaline_kernels.rows import Rows, StateLines

# fp32 values behind the states of a part's end; the first is the exponent of its decay.
PADDING = 16
# Of the widest state that 4 warps have registers for.
WIDE_STATE = 128
# Blocks of tiles on their way. Of a walk that has no outputs more leave room for two programs on a multiprocessor.
STAGES, ENDS_STAGES = 2, 4


@triton.jit
def _advance(h, b_b, b_x, p_steps, CHUNK: tl.constexpr):
    """Return the state h `[P block, S]` after a chunk."""
    g_last = tl.load(p_steps + CHUNK - 1)
    weights = tl.exp2(g_last - tl.load(p_steps + CHUNK + tl.arange(0, CHUNK)))
    b_w = (b_x.to(tl.float32) * weights[:, None]).to(b_x.dtype)
    return tl.dot(tl.trans(b_w), b_b, acc=h * tl.exp2(g_last))


@triton.jit
def _output(h, b_b, b_c, b_x, p_steps, skip, CHUNK: tl.constexpr):
    """Return the outputs `[CHUNK, P block]` of a chunk before which the state is h, in fp32."""
    o_c = tl.arange(0, CHUNK)
    g_i = tl.load(p_steps + o_c)[:, None]
    g_j = tl.load(p_steps + CHUNK + o_c)[None, :]
    seen = o_c[:, None] >= o_c[None, :]
    scores = tl.dot(b_c, tl.trans(b_b)) * tl.exp2(tl.where(seen, g_i - g_j, float("-inf")))
    # What is not finite in a later token stays there.
    scores = tl.where(seen, scores, 0.0).to(b_x.dtype)
    b_y = tl.dot(b_c, tl.trans(h.to(b_c.dtype))) * tl.exp2(g_i) + b_x.to(tl.float32) * skip
    return tl.dot(scores, b_x, acc=b_y)


@triton.jit
def _walk_tiles(
    h,
    tiles,
    columns,
    p_steps,
    skip,
    first_t,
    begin,
    end,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    ENDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return what is behind the whole chunks from token `begin` to `end`, counted from first_t; store their outputs.

    The state, the place of the next chunk's steps, and by what they decay together, as an exponent of 2: if ENDS are
    wanted, and then no outputs. tiles: of x, of B and C, and of the outputs. columns: of x, B and C.
    """
    x_tiles, s_tiles, y_tiles = tiles
    column_x, column_b, column_c = columns
    total = 0.0
    for done in tl.range(begin, end, CHUNK, num_stages=STAGES):
        i_t = (first_t + done).to(tl.int32)
        b_b = s_tiles.load([i_t, column_b])
        b_x = x_tiles.load([i_t, column_x])
        if ENDS:
            total += tl.load(p_steps + CHUNK - 1)
        else:
            b_c = s_tiles.load([i_t, column_c])
            b_y = _output(h, b_b, b_c, b_x, p_steps, skip, CHUNK)
            y_tiles.store([i_t, column_x], b_y.to(y_tiles.dtype))
        h = _advance(h, b_b, b_x, p_steps, CHUNK)
        p_steps += H * 2 * CHUNK
    return h, p_steps, total


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["control_stride", "num_parts", "part_length", "ends_length"],
    do_not_specialize_on_alignment=["control", "waypoints"],
)
def _walk(
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
    ends_length,
    xBC_stride,
    waypoints,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDING: tl.constexpr,
    HAS_D: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    # Rows are in parts; this is their first walk, which finds their ends and no outputs; tiles are copied whole.
    PARTS: tl.constexpr,
    ENDS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    END: tl.constexpr = 2 * P * S + PADDING
    STEPS: tl.constexpr = 2 * CHUNK
    i_p = tl.program_id(0) % BLOCKS
    i_h = tl.program_id(0) // BLOCKS % H
    i_part = tl.program_id(0) // (BLOCKS * H) % num_parts
    i_row = tl.program_id(0) // (BLOCKS * H) // num_parts
    i_g = i_h // (H // G)
    begin, n, read, write, _, replayed, half = load_row(control, control_stride, i_row)
    live = (read != -1) | (write != -1)
    part_begin = i_part * part_length
    part_end = tl.minimum(n, part_begin + part_length)
    if ENDS:
        is_here = live & (part_end < n)
    else:
        is_here = (part_begin < n) | (i_part == 0)
    if is_here:
        o_s = tl.arange(0, BLOCK_S)
        o_p = i_p * BLOCK_P + tl.arange(0, BLOCK_P)
        o_c = tl.arange(0, CHUNK)
        in_s = o_s < S
        in_p = o_p < P
        in_h = in_p[:, None] & in_s[None, :]
        o_h = o_p[:, None] * S + o_s[None, :]
        # The last part overwrites the line: of a row in parts the first walk keeps what is in it for the second.
        is_read = (read > 0) & (i_part == 0)
        if PARTS and not ENDS:
            is_read = is_read & (part_end == n)
        p_start = find_state(lines, read - LINE_SHIFT, i_h, P * S) + o_h
        h = tl.load(p_start, mask=in_h & is_read, other=0.0).to(tl.float32)
        p_drafts = find_drafts(lines, read - LINE_SHIFT, half)
        h = fold_drafts(h, p_drafts, tl.where(is_read, replayed, 0), i_g, i_h, o_s, o_p, G, H, S, P)
        # Parts that are not the last of their rows are equally long: no two begin in the same stretch of that length.
        p_end = ends + ((begin + part_begin) // part_length * H + i_h) * END
        if ENDS:
            tl.store(p_end + P * S + o_h, h, mask=in_h & (i_part == 0))
        elif PARTS:
            p_before = ends + (begin // ends_length * H + i_h) * END
            h += tl.load(p_before + P * S + o_h, mask=in_h & (i_part == 0) & (part_end < n), other=0.0)
            for i in range(0, part_begin // ends_length):
                h = h * tl.exp2(tl.load(p_before + 2 * P * S)) + tl.load(p_before + o_h, mask=in_h, other=0.0)
                p_before = ends + ((begin + (i + 1) * ends_length) // ends_length * H + i_h) * END
        skip = 0.0
        if HAS_D:
            skip = tl.load(D + i_h).to(tl.float32)

        num_tokens = tl.maximum(part_end - part_begin, 0)
        first_t = begin + part_begin
        p_steps = steps + ((begin // CHUNK + i_row + part_begin // CHUNK) * H + i_h) * STEPS
        column_x = i_h * P + i_p * BLOCK_P
        column_b = H * P + i_g * S
        column_c = H * P + (G + i_g) * S
        o_y = o_c[:, None] * (H * P) + o_p[None, :]
        num_dead = tl.where(live, 0, num_tokens)
        num_whole = tl.where(live, num_tokens // CHUNK * CHUNK, 0) if TILES else 0
        # What a part decays by, as an exponent of 2.
        total = 0.0
        if TILES:
            walked, columns = (x_tiles, s_tiles, y_tiles), (column_x, column_b, column_c)
            if waypoints is None:
                h, p_steps, total = _walk_tiles(
                    h, walked, columns, p_steps, skip, first_t, 0, num_whole, H, CHUNK, ENDS, STAGES
                )
            else:
                # From stop to stop: what is stored on the way would take shared memory beside that of the tiles.
                done = 0
                while done < num_whole:
                    stop, line = find_stop(waypoints, begin, n, i_row, part_begin + done, part_begin + num_whole)
                    stop -= part_begin
                    h, p_steps, total = _walk_tiles(
                        h, walked, columns, p_steps, skip, first_t, done, stop, H, CHUNK, ENDS, STAGES
                    )
                    keep_state(line, lines, h, o_h, in_h, i_h, P * S, LINE_SHIFT, APART)
                    done = stop
        for done in tl.range(num_whole, num_tokens - num_dead, CHUNK, num_stages=1):
            in_t = (done + o_c < num_tokens)[:, None]
            p_token = xBC + (first_t + done) * xBC_stride + o_c[:, None] * xBC_stride
            b_b = tl.load(p_token + column_b + o_s[None, :], mask=in_t & in_s[None, :], other=0.0)
            b_x = tl.load(p_token + i_h * P + o_p[None, :], mask=in_t & in_p[None, :], other=0.0)
            if ENDS:
                total += tl.load(p_steps + CHUNK - 1)
            else:
                b_c = tl.load(p_token + column_c + o_s[None, :], mask=in_t & in_s[None, :], other=0.0)
                b_y = _output(h, b_b, b_c, b_x, p_steps, skip, CHUNK)
                p_y = y + ((first_t + done) * H + i_h) * P + o_y
                tl.store(p_y, b_y.to(y.dtype.element_ty), mask=in_t & in_p[None, :])
            h = _advance(h, b_b, b_x, p_steps, CHUNK)
            p_steps += H * STEPS
            if waypoints is not None:
                line = find_waypoint(waypoints, begin, n, i_row, part_begin + done + CHUNK)
                keep_state(line, lines, h, o_h, in_h, i_h, P * S, LINE_SHIFT, APART)
        if ENDS:
            tl.store(p_end + o_h, h, mask=in_h)
            tl.store(p_end + 2 * P * S, total)
        else:
            for done in range(0, num_dead, CHUNK):
                p_y = y + ((first_t + done) * H + i_h) * P + o_y
                in_y = (done + o_c < num_tokens)[:, None] & in_p[None, :]
                tl.store(p_y, tl.zeros((CHUNK, BLOCK_P), y.dtype.element_ty), mask=in_y)
            # An empty row changes its line only by a replay or by a move.
            if (part_end == n) & (write > 0) & ((n > 0) | (replayed > 0) | is_elsewhere(read, write, APART)):
                p_new = find_written(lines, write - LINE_SHIFT, i_h, P * S, APART) + o_h
                tl.debug_barrier()
                tl.store(p_new, h.to(p_new.dtype.element_ty), mask=in_h)


def launch_chunk(inputs: MambaInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Run `rows` of 16-bit values, none of which is a VERIFY, in chunks. Mutates `lines` and `y`."""
    if rows.num_rows == 0:
        return
    xBC, heads = inputs.xBC, inputs.heads
    head_dim, state_dim = heads.head_dim, heads.state_dim
    steps = launch_steps(inputs, rows)
    plan = choose_plan(heads, rows.num_rows, xBC.shape[0], rows.max_length)
    in_parts = plan.num_parts > 1
    pieces = choose_pieces(heads, rows.num_rows, plan)
    num_ends = xBC.shape[0] // pieces.part_length + 1 if in_parts else 0
    size = (num_ends, heads.num_heads, 2 * head_dim * state_dim + PADDING)
    ends = torch.empty(size, dtype=torch.float32, device=xBC.device)
    block_s = max(16, triton.next_power_of_2(state_dim))
    tiles = head_dim % BLOCK_P == 0 and state_dim == block_s and is_aligned(xBC) and is_aligned(y)
    tiles = tiles and has_room(xBC, state_dim)

    def walk(*, ends_only: bool) -> None:
        x_tiles = s_tiles = y_tiles = None
        stages = ENDS_STAGES if ends_only else STAGES
        cut = pieces if ends_only else plan
        if tiles:
            view = ((xBC.shape[0], heads.channels), (xBC.stride(0), 1))
            x_tiles = TensorDescriptor(xBC, *view, [CHUNK, BLOCK_P])
            s_tiles = TensorDescriptor(xBC, *view, [CHUNK, state_dim])
            width = heads.value_channels
            y_tiles = TensorDescriptor(y, (y.shape[0], width), (width, 1), [CHUNK, BLOCK_P])
        _walk[(rows.num_rows * cut.num_parts * heads.num_heads * triton.cdiv(head_dim, BLOCK_P),)](
            xBC,
            x_tiles,
            s_tiles,
            y_tiles,
            steps,
            inputs.weights[1],
            ends,
            *lines.arguments(rows, y),
            cut.num_parts,
            cut.part_length,
            pieces.part_length,
            xBC.stride(0),
            None if ends_only else rows.waypoints,
            **inputs.sizes,
            BLOCK_P=BLOCK_P,
            BLOCK_S=block_s,
            CHUNK=CHUNK,
            PADDING=PADDING,
            HAS_D=inputs.D is not None,
            **lines.constants,
            PARTS=in_parts,
            ENDS=ends_only,
            TILES=tiles,
            STAGES=stages,
            num_warps=4 if state_dim <= WIDE_STATE else 8,
            num_stages=stages,
        )

    if in_parts:
        walk(ends_only=True)
    if tiles and can_walk(inputs, y):
        launch_walk(inputs, lines, rows, y, steps, ends, plan, pieces.part_length, padding=PADDING)
    else:
        walk(ends_only=False)
