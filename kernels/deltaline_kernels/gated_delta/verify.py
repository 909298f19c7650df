"""Rows of a few tokens as one small chunk, for 16-bit tokens, in Triton: VERIFY, and what is short beside it.

With G_t the sum of the first t gates, h the state before them, and k and q after their norms:

    u_t = beta_t (v_t - exp(G_t) h k_t - sum_{j<t} exp(G_t - G_j) (k_t.k_j) u_j)
    o_t = exp(G_t) h q_t + sum_{j<=t} exp(G_t - G_j) (q_t.k_j) u_j
    h = exp(G_n) h + sum_t exp(G_n - G_t) u_t k_t^T

So all products of the state are one, of h and the row's keys and queries, and what does not need the state is computed
while it is on its way. A program has some rows of one head's state in the registers of one warp: it folds the replayed
drafts, stores the state if the row commits nothing itself, then computes the row's tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.delta_rule.gates import read_gates
from deltaline_kernels.device.delta_rule.inputs import MANY_HEADS, DeltaInputs
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.state_tile import below, hand_out, load_tile, scale, store_tile, to_fp32
from deltaline_kernels.device.token_tile import (
    TOKENS,
    add_tokens,
    compare,
    decay_between,
    fold_token,
    load_keys,
    load_records,
    load_tokens,
    multiply_pairs,
    order_tokens,
    remain,
)
from deltaline_kernels.rows import Rows, StateLines

# Threads that share a row of the state, and bytes that each loads at once.
ROW_THREADS, LOAD_BYTES = 4, 16
# Rows of a part of the state.
SUB = 16
# Parts of the state per program, registers, and records that are asked for before the state has come, for few and for
# many programs. Each is one warp: several would exchange operands. Measurements: docs/log.md.
FEW, MANY = (1, 168, 2), (2, 255, 3)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["control_stride", "q_units", "k_units", "v_units"], do_not_specialize_on_alignment=["control"]
)
def _verify(
    tokens,
    gates,
    lines,
    o,
    control,
    control_stride,
    query_scale,
    eps,
    a_stride,
    b_stride,
    q_units,
    k_units,
    v_units,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    RAW: tl.constexpr,
    NORM: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    BLOCKS: tl.constexpr = K // BLOCK_K
    BLOCK_V: tl.constexpr = PARTS * SUB
    GATES: tl.constexpr = H * K + HV * V
    RECORD: tl.constexpr = GATES + HV
    q, k, v = tokens
    a, b, A_log, dt_bias = gates
    # Multiples of UNIT and, for all the compiler knows, of no more: as many values of q and k at once as of the state.
    q_stride, k_stride, v_stride = q_units * UNIT, k_units * UNIT, v_units * UNIT
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_v = tl.program_id(0) % NUM_BLOCKS
    i_hv = tl.program_id(0) // NUM_BLOCKS % HV
    i_row = tl.program_id(0) // (NUM_BLOCKS * HV)
    i_h = i_hv // (HV // H)
    begin, length, read, write, committed, replayed, half = load_row(control, control_stride, i_row)
    # Of a skipped row nothing is read; what is computed from nothing is zero.
    n = tl.where((read == -1) & (write == -1), 0, length)

    o_v = i_v * BLOCK_V + tl.arange(0, SUB)
    p_q = q + begin * q_stride + i_h * K
    p_k = k + begin * k_stride + i_h * K
    o_t = tl.arange(0, TOKENS)
    o_row = o_t[:, None]
    o_column = o_t[None, :]
    values = ()
    for r in tl.static_range(PARTS):
        o_r = (o_v + r * SUB)[None, :]
        inside = (o_row < n) & below(o_r, V, BLOCK_V)
        values = values + (tl.load(v + (begin + o_row) * v_stride + i_hv * V + o_r, mask=inside, other=0.0),)
    p_state = find_state(lines, read - LINE_SHIFT, i_hv, V * K)
    raw = load_tile(p_state, read > 0, o_v[:, None], V, K, PARTS, SUB, BLOCK_K)
    p_old = find_drafts(lines, read - LINE_SHIFT, half)
    drafted, held = load_records(p_old, 0, replayed, i_h, i_hv, o_v[:, None], H, HV, K, V, PARTS, SUB, AT_ONCE)
    kept = 1.0
    left = tl.zeros((TOKENS,), tl.float32)
    g = tl.zeros((TOKENS,), tl.float32)
    beta, factor_k, total_k, total_q = g, g, g, g
    to_updates = tl.zeros((TOKENS, TOKENS), tl.float32)
    to_outputs = to_updates
    if n + replayed > 0:
        # A branch, and what it needs is loaded in it: loads that are on their way across a branch share one counter, so
        # that who waits for a token would wait for the state.
        keys = load_tokens(p_k, p_q, n, k_stride, q_stride, K, BLOCK_K)
        b_a = tl.load(a + (begin + o_t) * a_stride + i_hv, mask=o_t < n, other=0.0)
        b_b = tl.load(b + (begin + o_t) * b_stride + i_hv, mask=o_t < n, other=0.0)
        b_rate, b_bias = 0.0, 0.0
        if not RAW:
            b_rate = tl.load(A_log + i_hv).to(tl.float32)
            b_bias = tl.load(dt_bias + i_hv).to(tl.float32)
        old = tl.load(p_old + o_t * RECORD + GATES + i_hv, mask=o_t < replayed, other=0.0)
        kept, left = remain(old)
        # What the row's tokens are to each other: rows are later tokens, columns earlier ones.
        kk, qk, qq = compare(keys, BLOCK_K, BLOCKS)
        g, beta = read_gates(b_a, b_b, b_rate, b_bias, RAW)
        g = tl.where(o_t < n, g, 0.0)
        factor_k += 1.0
        factor_q = query_scale + total_q
        if NORM:
            same = o_row == o_column
            factor_k = tl.rsqrt(tl.sum(tl.where(same, kk, 0.0), axis=1) + eps)
            factor_q = query_scale * tl.rsqrt(tl.sum(tl.where(same, qq, 0.0), axis=1) + eps)
        later = o_row > o_column
        total, decay = decay_between(g)
        decay *= factor_k[None, :]
        to_updates = tl.where(later, kk * decay * (-beta * factor_k)[:, None], 0.0)
        to_outputs = tl.where(o_row >= o_column, qk * decay * factor_q[:, None], 0.0)
        total_k, total_q = total * factor_k, total * factor_q

    tile = to_fp32(raw, PARTS * BLOCKS)
    if replayed > 0:
        tile = scale(tile, kept, PARTS * BLOCKS)
        for j in tl.static_range(AT_ONCE):
            if j < replayed:
                key = hand_out(held[j], 1, BLOCK_K, BLOCKS, LEVELS)
                tile = fold_token(tile, left, j, drafted[j], key, PARTS, BLOCKS)
        for i in range(AT_ONCE, replayed):
            more = load_records(p_old, i, replayed, i_h, i_hv, o_v[:, None], H, HV, K, V, PARTS, SUB, 1)
            key = hand_out(more[1][0], 1, BLOCK_K, BLOCKS, LEVELS)
            tile = fold_token(tile, left, i, more[0][0], key, PARTS, BLOCKS)
    p_new = find_written(lines, write - LINE_SHIFT, i_hv, V * K, APART)
    if (write > 0) & (committed == 0) & ((replayed > 0) | is_elsewhere(read, write, APART)):
        store_tile(p_new, tile, o_v[:, None], V, K, PARTS, SUB, BLOCK_K)

    # Once more: to keep them, or to have them come while records are folded, takes registers that the state needs.
    keys = load_tokens(p_k, p_q, n, k_stride, q_stride, K, BLOCK_K)
    pairs = order_tokens(keys, BLOCK_K, BLOCKS)
    seen_k, seen_q = multiply_pairs(tile, pairs, PARTS, SUB, BLOCK_K, BLOCKS, EXACT=True)
    # Row t is u_t as soon as what the tokens before it add is in it.
    updates, outputs = (), ()
    for r in tl.static_range(PARTS):
        updates = updates + (beta[:, None] * (values[r].to(tl.float32) - total_k[:, None] * seen_k[r]),)
        outputs = outputs + (total_q[:, None] * seen_q[r],)
    updates, outputs = add_tokens(updates, outputs, to_updates, to_outputs, n, PARTS, SUB)

    records = (write > 0) & (committed == 0)
    p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half)
    for r in tl.static_range(PARTS):
        o_r = (o_v + r * SUB)[None, :]
        inside = below(o_r, V, BLOCK_V)
        p_o = o + ((begin + o_row) * HV + i_hv) * V + o_r
        tl.store(p_o, outputs[r].to(o.dtype.element_ty), mask=inside & (o_row < length))
        p_update = p_draft + o_row * RECORD + H * K + i_hv * V + o_r
        tl.store(p_update, updates[r], mask=inside & (o_row < n) & records)
    # k is shared by the programs of a key head: one of them records it. The gates are shared by the blocks of V.
    if records & (i_v == 0):
        tl.store(p_draft + o_t * RECORD + GATES + i_hv, g, mask=o_t < n)
        if i_hv % (HV // H) == 0:
            for j in tl.static_range(BLOCKS):
                o_k = j * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
                key = (
                    tl.load(p_k + o_row * k_stride + o_k, mask=o_row < n, other=0.0).to(tl.float32) * factor_k[:, None]
                )
                tl.store(p_draft + i_h * K + o_row * RECORD + o_k, key, mask=o_row < n)

    if (write > 0) & (committed > 0):
        kept, left = remain(g)
        tile = scale(tile, kept, PARTS * BLOCKS)
        for t in range(0, n):
            columns = ()
            for r in tl.static_range(PARTS):
                columns = columns + (tl.sum(tl.where(o_row == t, updates[r], 0.0), axis=0)[:, None],)
            factor = tl.sum(tl.where(o_t == t, factor_k, 0.0))
            key = to_fp32(load_keys(p_k + t * k_stride, True, K, BLOCK_K), BLOCKS)
            tile = fold_token(tile, left, t, columns, scale(key, factor, BLOCKS), PARTS, BLOCKS)
        store_tile(p_new, tile, o_v[:, None], V, K, PARTS, SUB, BLOCK_K)


def launch_verify(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Run `rows`, for which `can_verify` holds, as a chunk each; arguments as of `gated_delta_triton`.

    Mutates `lines` and `o`.
    """
    if rows.num_rows == 0:
        return
    heads = inputs.heads
    many = rows.num_rows * heads.num_value_heads >= MANY_HEADS
    parts, max_registers, at_once = MANY if many else FEW
    vector = LOAD_BYTES // lines.state.element_size()
    unit, strides = inputs.count_strides(vector)
    _verify[(rows.num_rows * heads.num_value_heads * triton.cdiv(heads.value_dim, parts * SUB),)](
        inputs.tokens,
        inputs.gates,
        *lines.arguments(rows, o),
        *inputs.numbers,
        *strides,
        **inputs.sizes,
        RAW=inputs.A_log is None,
        NORM=inputs.normalize,
        **lines.constants,
        UNIT=unit,
        PARTS=parts,
        SUB=SUB,
        BLOCK_K=ROW_THREADS * vector,
        AT_ONCE=at_once,
        LEVELS=(heads.key_dim // (ROW_THREADS * vector)).bit_length() - 1,
        num_warps=1,
        num_stages=1,
        maxnreg=max_registers,
    )
