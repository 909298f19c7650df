"""KDA token by token in Triton: decode, and short rows that are not computed at once.

    h = h . exp(g);  u = beta (v - h k);  h += u k^T;  o = h q

A program holds some rows of one head's state in registers: it folds the replayed drafts, stores the state if the row
commits nothing itself, then runs the row's tokens. Decode is a verify of one token that commits it. A verify keeps each
token's u, so that its replay, h = h . exp(g) + u k^T, needs no product of the state and leaves what committing leaves,
to the bit.

What is of key channels alone (gates, norms, decays) each thread finds for channels of its own; then it is handed to all
rows: eight threads share a row of the state, so computed where it is used each warp would find it four times.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.delta_rule.gates import key_log_decay, read_strength
from deltaline_kernels.device.delta_rule.inputs import MANY_HEADS, DeltaInputs
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.row import TOKEN_LINES, load_row
from deltaline_kernels.device.state_tile import (
    add_outer,
    below,
    decay_keys,
    hand_out,
    load_tile,
    load_values,
    multiply,
    store_tile,
    to_fp32,
)
from deltaline_kernels.device.waypoints import TOKENS, find_waypoint
from deltaline_kernels.rows import Rows, StateLines

# Bytes of a state's row that 8 threads load at once: whole sectors. A warp has 4 such rows at a time.
ROW_BYTES = 128
ROWS_PER_WARP = 4
# Warps, parts and registers, of few heads and of many: for these by the bytes of a state's value, as parts of 2 bytes
# take half as long to come. Measurements: docs/log.md.
FEW, MANY = (2, 1, None), {4: (1, 2, 128), 2: (1, 4, 168)}
# With larger keys these parts don't fit in the registers: half of them do, in as many as they take.
LARGEST_KEY = 128


@triton.jit
def _load_token(p_q, p_k, p_v, p_a, p_b, in_k, mask, o_v, V: tl.constexpr, PARTS: tl.constexpr, SUB: tl.constexpr):
    """Return q, k, a, v and b of a token of one head, as they come; v and b anything where `mask` is not set."""
    q = tl.load(p_q, mask=in_k & mask, other=0.0)
    k = tl.load(p_k, mask=in_k & mask, other=0.0)
    a = tl.load(p_a, mask=in_k & mask, other=0.0)
    return q, k, a, load_values(p_v, mask, o_v, V, PARTS, SUB), tl.load(p_b, mask=mask)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["control_stride", "q_units", "k_units", "v_units"],
    do_not_specialize_on_alignment=["control", "waypoints"],
)
def _recurrent_keyed(
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
    lower_bound,
    waypoints,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    RAW: tl.constexpr,
    NORM: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    TABLE: tl.constexpr,
    ONE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEVELS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WIDTH: tl.constexpr = BLOCK_K << LEVELS
    GATES: tl.constexpr = H * K + HV * V
    RECORD: tl.constexpr = GATES + HV * K
    q, k, v = tokens
    a, b, A_log, dt_bias = gates
    # Multiples of UNIT and, for all the compiler knows, of no more.
    q_stride, k_stride, v_stride = q_units * UNIT, k_units * UNIT, v_units * UNIT
    NUM_BLOCKS: tl.constexpr = (V + PARTS * SUB - 1) // (PARTS * SUB)
    i_v = tl.program_id(0) % NUM_BLOCKS
    i_hv = tl.program_id(0) // NUM_BLOCKS % HV
    i_row = tl.program_id(0) // (NUM_BLOCKS * HV)
    i_h = i_hv // (HV // H)
    begin, n, read, write, committed, replayed, half = load_row(control, control_stride, i_row)

    o_v = i_v * (PARTS * SUB) + tl.arange(0, SUB)[:, None]
    o_k = tl.arange(0, WIDTH)
    in_k = below(o_k, K, WIDTH)
    p_o = o + (begin * HV + i_hv) * V
    if (read == -1) & (write == -1):
        for _ in range(0, n):
            for r in tl.static_range(PARTS):
                o_row = o_v + r * SUB
                tl.store(p_o + o_row, tl.zeros((SUB, 1), o.dtype.element_ty), mask=below(o_row, V, PARTS * SUB))
            p_o += HV * V
        n = 0
    p_q = q + begin * q_stride + i_h * K + o_k
    p_k = k + begin * k_stride + i_h * K + o_k
    p_v = v + begin * v_stride + i_hv * V
    p_a = a + begin * a_stride + i_hv * K + o_k
    p_b = b + begin * b_stride + i_hv
    # Before the state: they are needed first.
    raw_q, raw_k, raw_a, raw_v, raw_b = _load_token(p_q, p_k, p_v, p_a, p_b, in_k, n > 0, o_v, V, PARTS, SUB)
    rate, bias = 0.0, 0.0
    if not RAW:
        rate = tl.load(A_log + i_hv).to(tl.float32)
        bias = tl.load(dt_bias + i_hv * K + o_k, mask=in_k, other=0.0).to(tl.float32)
    p_state = find_state(lines, read - LINE_SHIFT, i_hv, V * K)
    raw = load_tile(p_state, read > 0, o_v, V, K, PARTS, SUB, BLOCK_K)

    tile = to_fp32(raw, PARTS * BLOCKS)
    if replayed > 0:
        p_old = find_drafts(lines, read - LINE_SHIFT, half)
        for _ in range(0, replayed):
            key = tl.load(p_old + i_h * K + o_k, mask=in_k, other=0.0)
            decay = tl.exp(tl.load(p_old + GATES + i_hv * K + o_k, mask=in_k, other=0.0))
            updates = load_values(p_old + H * K + i_hv * V, True, o_v, V, PARTS, SUB)
            tile = decay_keys(tile, hand_out(decay, SUB, BLOCK_K, BLOCKS, LEVELS), PARTS, BLOCKS)
            tile = add_outer(tile, updates, hand_out(key, SUB, BLOCK_K, BLOCKS, LEVELS), PARTS, BLOCKS)
            p_old += RECORD

    p_new = find_written(lines, write - LINE_SHIFT, i_hv, V * K, APART)
    if (write > 0) & (committed == 0) & ((replayed > 0) | is_elsewhere(read, write, APART)):
        store_tile(p_new, tile, o_v, V, K, PARTS, SUB, BLOCK_K)

    # k is shared by the programs of a key head: one of them records it. The gates are shared by the blocks of V.
    records = (write > 0) & (committed == 0)
    records_gates = records & (i_v == 0)
    records_k = records_gates & (i_hv % (HV // H) == 0)
    p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half)
    for t in range(0, n):
        query, key, beta = raw_q.to(tl.float32), raw_k.to(tl.float32), read_strength(raw_b, RAW)
        g = key_log_decay(raw_a, rate, bias, lower_bound, RAW)
        values = to_fp32(raw_v, PARTS)
        if not ONE:
            # The last one comes twice, which costs no mask.
            more = t + 1 < n
            p_q += tl.where(more, q_stride, 0)
            p_k += tl.where(more, k_stride, 0)
            p_v += tl.where(more, v_stride, 0)
            p_a += tl.where(more, a_stride, 0)
            p_b += tl.where(more, b_stride, 0)
            raw_q, raw_k, raw_a, raw_v, raw_b = _load_token(p_q, p_k, p_v, p_a, p_b, in_k, True, o_v, V, PARTS, SUB)
        factor_q, factor_k = query_scale, 1.0
        if NORM:
            factor_q = query_scale * tl.rsqrt(tl.sum(query * query, axis=0) + eps)
            factor_k = tl.rsqrt(tl.sum(key * key, axis=0) + eps)
        query, key = query * factor_q, key * factor_k
        aligned = tl.zeros((SUB, 1), tl.float32) + tl.sum(query * key, axis=0)
        tile = decay_keys(tile, hand_out(tl.exp(g), SUB, BLOCK_K, BLOCKS, LEVELS), PARTS, BLOCKS)
        keys = hand_out(key, SUB, BLOCK_K, BLOCKS, LEVELS)
        queries = hand_out(query, SUB, BLOCK_K, BLOCKS, LEVELS)
        # h q after the token is the old tile's product and the token's own share: both products of the tile at once.
        updates, outputs = (), ()
        for r in tl.static_range(PARTS):
            outputs = outputs + (multiply(tile, r * BLOCKS, queries, BLOCKS),)
            updates = updates + (beta * (values[r] - multiply(tile, r * BLOCKS, keys, BLOCKS)),)
        # Nobody reads what the last token of a VERIFY would leave.
        if (t + 1 < n) | (committed > 0):
            tile = add_outer(tile, updates, keys, PARTS, BLOCKS)
        if TABLE:
            line = tl.load(control + (TOKEN_LINES + t) * control_stride + i_row).to(tl.int64)
            if line > 0:
                p_token_line = find_written(lines, line - LINE_SHIFT, i_hv, V * K, APART)
                store_tile(p_token_line, tile, o_v, V, K, PARTS, SUB, BLOCK_K)
        if waypoints is not None:
            done = t + 1
            if done % TOKENS == 0:
                line = find_waypoint(waypoints, begin, n, i_row, done)
                if line > 0:
                    p_kept = find_written(lines, line - LINE_SHIFT, i_hv, V * K, APART)
                    store_tile(p_kept, tile, o_v, V, K, PARTS, SUB, BLOCK_K)
        for r in tl.static_range(PARTS):
            o_row = o_v + r * SUB
            b_o = tl.fma(updates[r], aligned, outputs[r])
            tl.store(p_o + o_row, b_o.to(o.dtype.element_ty), mask=below(o_row, V, PARTS * SUB))
        p_o += HV * V
        if records:
            if records_k:
                tl.store(p_draft + i_h * K + o_k, key, mask=in_k)
            if records_gates:
                tl.store(p_draft + GATES + i_hv * K + o_k, g, mask=in_k)
            for r in tl.static_range(PARTS):
                o_row = o_v + r * SUB
                tl.store(p_draft + H * K + i_hv * V + o_row, updates[r], mask=below(o_row, V, PARTS * SUB))
            p_draft += RECORD

    if (write > 0) & (committed > 0):
        store_tile(p_new, tile, o_v, V, K, PARTS, SUB, BLOCK_K)


def launch_recurrent(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Run `rows` token by token, o `[T, HV, V]`; mutates `lines` and `o`. Arguments are validated by the caller."""
    if rows.num_rows == 0:
        return
    heads, state_bytes = inputs.heads, lines.state.element_size()
    width = max(16, triton.next_power_of_2(heads.key_dim))
    # Fewer values than threads would leave two threads with one value of a state that is updated in place.
    block_k = min(ROW_BYTES // state_bytes, width)
    many = rows.num_rows * heads.num_value_heads >= MANY_HEADS
    num_warps, parts, max_registers = MANY[state_bytes] if many else FEW
    if many and heads.key_dim > LARGEST_KEY:
        parts, max_registers = parts // 2, None
    sub = ROWS_PER_WARP * num_warps
    unit, strides = inputs.count_strides(16 // state_bytes)
    _recurrent_keyed[(rows.num_rows * heads.num_value_heads * triton.cdiv(heads.value_dim, parts * sub),)](
        inputs.tokens,
        inputs.gates,
        *lines.arguments(rows, o),
        *inputs.numbers,
        *strides,
        inputs.lower_bound,
        rows.waypoints,
        **inputs.sizes,
        RAW=inputs.A_log is None,
        NORM=inputs.normalize,
        **lines.constants,
        TABLE=rows.num_token_lines > 0,
        ONE=rows.max_length <= 1,
        UNIT=unit,
        PARTS=parts,
        SUB=sub,
        BLOCK_K=block_k,
        LEVELS=(width // block_k).bit_length() - 1,
        num_warps=num_warps,
        num_stages=1,
        maxnreg=max_registers,
    )
