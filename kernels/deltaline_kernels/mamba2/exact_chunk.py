"""The Mamba2 recurrence (SSD) in chunks, for long rows of fp32 values, in Triton: plain and right before fast.

Within a chunk, with S_ij = g_{j+1} + .. + g_i, G_i = g_1 + .. + g_i, d the time steps and h the state before it:

    y = exp(G) C h^T + tril(exp(S_ij) d_j C_i.B_j) X + D X
    h = exp(G_C) h + (exp(S_Cj) d_j x_j)^T B

A program holds a [P block, S] tile of one row's state, folds the replayed drafts and walks the row's chunks in order.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.replay import fold_drafts
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.waypoints import TOKENS, find_waypoint, keep_state
from deltaline_kernels.mamba2.gates import read_rate, time_step
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.rows import Rows, StateLines

CHUNK = 16
# No dot has more than 16 rows, so that a state of 256 columns stays in registers. Hopper's asynchronous matrix
# instruction needs 64: below that Triton uses the synchronous one, which the assembler (ptxas 12.8 in Triton 3.6 and
# 3.7) gets right with operands in registers.
BLOCK_P = 16


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride"], do_not_specialize_on_alignment=["control", "waypoints"])
def _chunk(
    xBC,
    dt,
    rate,
    D,
    dt_bias,
    lines,
    y,
    control,
    control_stride,
    least,
    greatest,
    xBC_stride,
    dt_stride,
    waypoints,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LOG_RATE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) // H
    i_h = tl.program_id(0).to(tl.int64) % H
    i_p = tl.program_id(1).to(tl.int64)
    i_g = i_h // (H // G)
    begin, n, read, write, _, replayed, half = load_row(control, control_stride, i_row)
    live = (read != -1) | (write != -1)

    o_s = tl.arange(0, BLOCK_S)
    o_p = i_p * BLOCK_P + tl.arange(0, BLOCK_P)
    o_c = tl.arange(0, CHUNK)
    in_s = o_s < S
    in_p = o_p < P
    in_h = in_p[:, None] & in_s[None, :]
    o_h = o_p[:, None] * S + o_s[None, :]
    p_state = find_state(lines, read - LINE_SHIFT, i_h, P * S)
    b_h = tl.load(p_state + o_h, mask=in_h & (read > 0), other=0.0).to(tl.float32)
    p_old = find_drafts(lines, read - LINE_SHIFT, half)
    b_h = fold_drafts(b_h, p_old, replayed, i_g, i_h, o_s, o_p, G, H, S, P)

    b_rate = read_rate(tl.load(rate + i_h), LOG_RATE)
    b_bias, skip = 0.0, 0.0
    if HAS_BIAS:
        b_bias = tl.load(dt_bias + i_h).to(tl.float32)
    if HAS_D:
        skip = tl.load(D + i_h).to(tl.float32)
    after = o_c[:, None] > o_c[None, :]  # row i comes after column j
    for first in range(0, n, CHUNK):
        in_t = (first + o_c < n) & live
        o_t = begin + first + o_c
        in_x = in_t[:, None] & in_p[None, :]
        in_b = in_t[:, None] & in_s[None, :]
        p_token = xBC + o_t[:, None] * xBC_stride
        p_b = p_token + H * P + i_g * S + o_s[None, :]
        b_x = tl.load(p_token + i_h * P + o_p[None, :], mask=in_x, other=0.0).to(tl.float32)  # (CHUNK, BLOCK_P)
        b_b = tl.load(p_b, mask=in_b, other=0.0).to(tl.float32)  # (CHUNK, BLOCK_S)
        b_c = tl.load(p_b + G * S, mask=in_b, other=0.0).to(tl.float32)  # (CHUNK, BLOCK_S)
        b_dt = tl.load(dt + o_t * dt_stride + i_h, mask=in_t, other=0.0)
        b_step = time_step(b_dt, b_bias, least, greatest, SOFTPLUS)
        b_step = tl.where(in_t, b_step, 0.0)
        b_g = b_rate * b_step
        b_u = b_x * b_step[:, None]

        # S is added up decay by decay: a difference of prefix sums would cancel behind a strong one.
        b_later = tl.where(after, b_g[:, None], 0.0)
        b_decay = tl.where(o_c[:, None] >= o_c[None, :], tl.exp(tl.cumsum(b_later, axis=0)), 0.0)
        b_rest = tl.exp(tl.sum(b_later, axis=0))  # exp(S_Cj)
        b_total = tl.exp(tl.cumsum(b_g, axis=0))  # exp(G)
        b_scores = tl.dot(b_c, tl.trans(b_b), input_precision="ieee") * b_decay
        b_y = b_total[:, None] * tl.dot(b_c, tl.trans(b_h), input_precision="ieee")
        b_y += tl.dot(b_scores, b_u, input_precision="ieee") + b_x * skip
        b_y = tl.where(live, b_y, 0.0)
        p_y = y + (o_t[:, None] * H + i_h) * P + o_p[None, :]
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=(first + o_c < n)[:, None] & in_p[None, :])
        b_update = tl.dot(tl.trans(b_u * b_rest[:, None]), b_b, input_precision="ieee")
        b_h = b_h * tl.exp(tl.sum(b_g, axis=0)) + b_update
        if waypoints is not None:
            done = first + CHUNK
            if live & (done % TOKENS == 0):
                line = find_waypoint(waypoints, begin, n, i_row, done)
                keep_state(line, lines, b_h, o_h, in_h, i_h, P * S, LINE_SHIFT, APART)

    # An empty row changes its line only by a replay or by a move.
    if (write > 0) & ((n > 0) | (replayed > 0) | is_elsewhere(read, write, APART)):
        p_new = find_written(lines, write - LINE_SHIFT, i_h, P * S, APART)
        tl.debug_barrier()
        tl.store(p_new + o_h, b_h.to(p_new.dtype.element_ty), mask=in_h)


def launch_exact_chunk(inputs: MambaInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Run `rows`, none of which is a VERIFY, in chunks; arguments as of `mamba2_triton`. Mutates `lines` and `y`."""
    if rows.num_rows == 0:
        return
    heads = inputs.heads
    # fp32 products, without matrix instructions; a smaller tile per thread keeps them in registers.
    grid = (rows.num_rows * heads.num_heads, triton.cdiv(heads.head_dim, BLOCK_P))
    _chunk[grid](
        inputs.xBC,
        inputs.dt,
        *inputs.weights,
        *lines.arguments(rows, y),
        *heads.dt_limit,
        inputs.xBC.stride(0),
        inputs.dt.stride(0),
        rows.waypoints,
        **inputs.sizes,
        **inputs.steps,
        BLOCK_P=BLOCK_P,
        BLOCK_S=max(16, triton.next_power_of_2(heads.state_dim)),
        HAS_D=inputs.D is not None,
        **lines.constants,
        CHUNK=CHUNK,
        num_warps=8,
        num_stages=1,
    )
