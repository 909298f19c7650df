"""The gated delta rule in chunks, for long rows of fp32 values, in Triton: plain and right before fast.

Within a chunk, with S_ij = g_{j+1} + .. + g_i, G_i = g_1 + .. + g_i and h the state before it:

    (I + tril(beta_i exp(S_ij) k_i.k_j, -1)) U = beta (V - exp(G) K h^T)
    o = exp(G) Q h^T + tril(exp(S_ij) q_i.k_j) U
    h = exp(G_C) h + U^T (exp(S_Cj) k_j)

A program holds a [V block, K] tile of one row's state, folds the replayed drafts and walks the row's chunks in order.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.delta_rule.gates import read_gates
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.replay import fold_drafts
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.waypoints import TOKENS, find_waypoint, keep_state
from deltaline_kernels.rows import Rows, StateLines

CHUNK = 16
# No dot has more than 32 rows. Hopper's asynchronous matrix instruction needs 64: below that Triton uses the
# synchronous one, which the assembler (ptxas 12.8 in Triton 3.6 and 3.7) gets right with operands in registers.
BLOCK_V = 32


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride"], do_not_specialize_on_alignment=["control", "waypoints"])
def _chunk(
    tokens,
    gates,
    lines,
    o,
    control,
    control_stride,
    scale,
    eps,
    a_stride,
    b_stride,
    strides,
    waypoints,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RAW: tl.constexpr,
    NORM: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    q, k, v = tokens
    a, b, A_log, dt_bias = gates
    q_stride, k_stride, v_stride = strides
    i_row = tl.program_id(0).to(tl.int64) // HV
    i_hv = tl.program_id(0).to(tl.int64) % HV
    i_v = tl.program_id(1).to(tl.int64)
    i_h = i_hv // (HV // H)
    begin, n, read, write, _, replayed, half = load_row(control, control_stride, i_row)
    live = (read != -1) | (write != -1)

    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_c = tl.arange(0, CHUNK)
    in_k = o_k < K
    in_v = o_v < V
    in_h = in_v[:, None] & in_k[None, :]
    o_h = o_v[:, None] * K + o_k[None, :]
    p_state = find_state(lines, read - LINE_SHIFT, i_hv, V * K)
    b_h = tl.load(p_state + o_h, mask=in_h & (read > 0), other=0.0).to(tl.float32)
    p_old = find_drafts(lines, read - LINE_SHIFT, half)
    b_h = fold_drafts(b_h, p_old, replayed, i_h, i_hv, o_k, o_v, H, HV, K, V)

    b_rate, b_bias = 0.0, 0.0
    if not RAW:
        b_rate = tl.load(A_log + i_hv).to(tl.float32)
        b_bias = tl.load(dt_bias + i_hv).to(tl.float32)
    after = o_c[:, None] > o_c[None, :]  # row i comes after column j
    for first in range(0, n, CHUNK):
        in_t = first + o_c < n
        o_t = begin + first + o_c
        in_qk = (in_t & live)[:, None] & in_k[None, :]
        in_x = (in_t & live)[:, None] & in_v[None, :]
        p_q = q + o_t[:, None] * q_stride + i_h * K + o_k[None, :]
        p_k = k + o_t[:, None] * k_stride + i_h * K + o_k[None, :]
        p_x = v + o_t[:, None] * v_stride + i_hv * V + o_v[None, :]
        b_q = tl.load(p_q, mask=in_qk, other=0.0).to(tl.float32)  # (CHUNK, BLOCK_K)
        b_k = tl.load(p_k, mask=in_qk, other=0.0).to(tl.float32)  # (CHUNK, BLOCK_K)
        b_x = tl.load(p_x, mask=in_x, other=0.0).to(tl.float32)  # (CHUNK, BLOCK_V)
        b_a = tl.load(a + o_t * a_stride + i_hv, mask=in_t & live, other=0.0)
        b_b = tl.load(b + o_t * b_stride + i_hv, mask=in_t & live, other=0.0)
        b_g, b_beta = read_gates(b_a, b_b, b_rate, b_bias, RAW)
        b_g = tl.where(in_t, b_g, 0.0)
        b_beta = tl.where(in_t, b_beta, 0.0)
        if NORM:
            b_q = b_q / tl.sqrt(tl.sum(b_q * b_q, axis=1) + eps)[:, None]
            b_k = b_k / tl.sqrt(tl.sum(b_k * b_k, axis=1) + eps)[:, None]
        b_q = b_q * scale

        # S is added up gate by gate: a difference of prefix sums would cancel behind a strong gate.
        b_later = tl.where(after, b_g[:, None], 0.0)
        b_s = tl.cumsum(b_later, axis=0)
        b_decay = tl.where(o_c[:, None] >= o_c[None, :], tl.exp(b_s), 0.0)  # S <= 0
        b_rest = tl.exp(tl.sum(b_later, axis=0))  # exp(S_Cj)
        b_total = tl.exp(tl.cumsum(b_g, axis=0))  # exp(G)

        b_kk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
        b_system = tl.where(after, b_kk * b_decay * b_beta[:, None], 0.0)
        b_seen = tl.dot(b_k, tl.trans(b_h), input_precision="ieee")
        b_u = b_beta[:, None] * (b_x - b_total[:, None] * b_seen)  # (CHUNK, BLOCK_V)
        # Forward substitution, one row after the other.
        b_columns = tl.trans(b_system)
        for i in range(1, CHUNK):
            b_row = tl.sum(tl.where(o_c[None, :] == i, b_columns, 0.0), axis=1)
            b_known = tl.sum(b_row[:, None] * b_u, axis=0)
            b_u = tl.where(o_c[:, None] == i, b_u - b_known[None, :], b_u)

        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_decay
        b_o = b_total[:, None] * tl.dot(b_q, tl.trans(b_h), input_precision="ieee")
        b_o += tl.dot(b_scores, b_u, input_precision="ieee")
        b_o = tl.where(live, b_o, 0.0)
        p_o = o + (o_t[:, None] * HV + i_hv) * V + o_v[None, :]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=in_t[:, None] & in_v[None, :])
        b_update = tl.dot(tl.trans(b_u * b_rest[:, None]), b_k, input_precision="ieee")
        b_h = b_h * tl.exp(tl.sum(b_g, axis=0)) + b_update
        if waypoints is not None:
            done = first + CHUNK
            if live & (done % TOKENS == 0):
                line = find_waypoint(waypoints, begin, n, i_row, done)
                keep_state(line, lines, b_h, o_h, in_h, i_hv, V * K, LINE_SHIFT, APART)

    # An empty row changes its line only by a replay or by a move.
    if (write > 0) & ((n > 0) | (replayed > 0) | is_elsewhere(read, write, APART)):
        p_new = find_written(lines, write - LINE_SHIFT, i_hv, V * K, APART)
        tl.store(p_new + o_h, b_h.to(p_new.dtype.element_ty), mask=in_h)


def launch_exact_chunk(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Run `rows`, none of which is a VERIFY, in chunks; arguments as of `gated_delta_triton`. Mutates `lines`, `o`."""
    if rows.num_rows == 0:
        return
    heads = inputs.heads
    # fp32 products, without matrix instructions; a smaller tile per thread keeps them in registers.
    grid = (rows.num_rows * heads.num_value_heads, triton.cdiv(heads.value_dim, BLOCK_V))
    _chunk[grid](
        inputs.tokens,
        inputs.gates,
        *lines.arguments(rows, o),
        *inputs.numbers,
        inputs.strides,
        rows.waypoints,
        **inputs.sizes,
        BLOCK_K=max(16, triton.next_power_of_2(heads.key_dim)),
        BLOCK_V=BLOCK_V,
        RAW=inputs.A_log is None,
        NORM=inputs.normalize,
        **lines.constants,
        CHUNK=CHUNK,
        num_warps=8,
        num_stages=1,
    )
