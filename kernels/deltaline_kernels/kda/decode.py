"""Rows of at most one token of KDA, of many heads, in Triton: a program walks through the state of a head.

What is of key channels alone is found once for all rows of the state that a program has, some at a time: those of the
next step are on their way while it computes and stores these. Each step is that of recurrent.py, to the bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.delta_rule.gates import key_log_decay, read_strength
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.state_tile import (
    add_outer,
    decay_keys,
    hand_out,
    load_tile,
    load_values,
    multiply,
    store_tile,
    to_fp32,
)
from deltaline_kernels.rows import Rows, StateLines

# Bytes of a state's row that 8 threads load at once: whole sectors. A warp has 4 such rows at a time.
ROW_BYTES, ROWS_PER_WARP = 128, 4
# Parts of a step, steps of a program, and registers.
PARTS, STEPS, MAX_REGISTERS = 4, 4, 255


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["control_stride", "q_units", "k_units", "v_units"], do_not_specialize_on_alignment=["control"]
)
def _decode_keyed(
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
    STEPS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEVELS: tl.constexpr,
):
    BLOCKS: tl.constexpr = K // BLOCK_K
    ROWS: tl.constexpr = PARTS * SUB
    GATES: tl.constexpr = H * K + HV * V
    RECORD: tl.constexpr = GATES + HV * K
    q, k, v = tokens
    a, b, A_log, dt_bias = gates
    # Multiples of UNIT and, for all the compiler knows, of no more.
    q_stride, k_stride, v_stride = q_units * UNIT, k_units * UNIT, v_units * UNIT
    NUM_BLOCKS: tl.constexpr = V // (STEPS * ROWS)
    i_v = tl.program_id(0) % NUM_BLOCKS
    i_hv = tl.program_id(0) // NUM_BLOCKS % HV
    i_row = tl.program_id(0) // (NUM_BLOCKS * HV)
    i_h = i_hv // (HV // H)
    begin, length, read, write, committed, replayed, half = load_row(control, control_stride, i_row)
    n = tl.where((read == -1) & (write == -1), 0, length)

    o_v = i_v * (STEPS * ROWS) + tl.arange(0, SUB)[:, None]
    o_k = tl.arange(0, K)
    p_v = v + begin * v_stride + i_hv * V
    p_o = o + (begin * HV + i_hv) * V
    p_state = find_state(lines, read - LINE_SHIFT, i_hv, V * K)
    p_new = find_written(lines, write - LINE_SHIFT, i_hv, V * K, APART)
    following = load_tile(p_state, read > 0, o_v, V, K, PARTS, SUB, BLOCK_K)
    following_v = load_values(p_v, n > 0, o_v, V, PARTS, SUB)
    raw_a = tl.load(a + begin * a_stride + i_hv * K + o_k, mask=n > 0, other=0.0)
    raw_k = tl.load(k + begin * k_stride + i_h * K + o_k, mask=n > 0, other=0.0)
    raw_q = tl.load(q + begin * q_stride + i_h * K + o_k, mask=n > 0, other=0.0)
    raw_b = tl.load(b + begin * b_stride + i_hv, mask=n > 0, other=0.0)
    rate, bias = 0.0, 0.0
    if not RAW:
        rate = tl.load(A_log + i_hv).to(tl.float32)
        bias = tl.load(dt_bias + i_hv * K + o_k).to(tl.float32)
    p_old = find_drafts(lines, read - LINE_SHIFT, half)
    p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half)
    records = (write > 0) & (committed == 0)
    decays = ()
    for _ in tl.static_range(BLOCKS):
        decays = decays + (tl.zeros((SUB, BLOCK_K), tl.float32),)
    keys, queries, aligned, beta = decays, decays, tl.zeros((SUB, 1), tl.float32), 0.0
    # A branch, before which all of the above is asked for: the assembler moves no load across.
    if n > 0:
        beta = read_strength(raw_b, RAW)
        g = key_log_decay(raw_a, rate, bias, lower_bound, RAW)
        query, key = raw_q.to(tl.float32), raw_k.to(tl.float32)
        factor_q, factor_k = query_scale, 1.0
        if NORM:
            factor_q = query_scale * tl.rsqrt(tl.sum(query * query, axis=0) + eps)
            factor_k = tl.rsqrt(tl.sum(key * key, axis=0) + eps)
        query, key = query * factor_q, key * factor_k
        aligned += tl.sum(query * key, axis=0)
        decays = hand_out(tl.exp(g), SUB, BLOCK_K, BLOCKS, LEVELS)
        keys = hand_out(key, SUB, BLOCK_K, BLOCKS, LEVELS)
        queries = hand_out(query, SUB, BLOCK_K, BLOCKS, LEVELS)
        # k is shared by the programs of a key head: one of them records it. The gates are shared by the blocks of V.
        if records & (i_v == 0):
            if i_hv % (HV // H) == 0:
                tl.store(p_draft + i_h * K + o_k, key)
            tl.store(p_draft + GATES + i_hv * K + o_k, g)
    moves = (write > 0) & (committed == 0) & ((replayed > 0) | is_elsewhere(read, write, APART))
    for step in tl.static_range(STEPS):
        o_r = o_v + step * ROWS
        tile, values = to_fp32(following, PARTS * BLOCKS), to_fp32(following_v, PARTS)
        if step + 1 < STEPS:
            following = load_tile(p_state, read > 0, o_r + ROWS, V, K, PARTS, SUB, BLOCK_K)
            following_v = load_values(p_v, n > 0, o_r + ROWS, V, PARTS, SUB)
        for i in range(0, replayed):
            p_record = p_old + i * RECORD
            old_key = tl.load(p_record + i_h * K + o_k)
            old_decay = tl.exp(tl.load(p_record + GATES + i_hv * K + o_k))
            old_updates = load_values(p_record + H * K + i_hv * V, True, o_r, V, PARTS, SUB)
            tile = decay_keys(tile, hand_out(old_decay, SUB, BLOCK_K, BLOCKS, LEVELS), PARTS, BLOCKS)
            tile = add_outer(tile, old_updates, hand_out(old_key, SUB, BLOCK_K, BLOCKS, LEVELS), PARTS, BLOCKS)
        if moves:
            store_tile(p_new, tile, o_r, V, K, PARTS, SUB, BLOCK_K)
        if n > 0:
            tile = decay_keys(tile, decays, PARTS, BLOCKS)
            updates, outputs = (), ()
            for r in tl.static_range(PARTS):
                outputs = outputs + (multiply(tile, r * BLOCKS, queries, BLOCKS),)
                updates = updates + (beta * (values[r] - multiply(tile, r * BLOCKS, keys, BLOCKS)),)
            for r in tl.static_range(PARTS):
                b_o = tl.fma(updates[r], aligned, outputs[r])
                tl.store(p_o + o_r + r * SUB, b_o.to(o.dtype.element_ty))
                if records:
                    tl.store(p_draft + H * K + i_hv * V + o_r + r * SUB, updates[r])
            tile = add_outer(tile, updates, keys, PARTS, BLOCKS)
        elif length > 0:
            for r in tl.static_range(PARTS):
                tl.store(p_o + o_r + r * SUB, tl.zeros((SUB, 1), o.dtype.element_ty))
        if (write > 0) & (committed > 0):
            store_tile(p_new, tile, o_r, V, K, PARTS, SUB, BLOCK_K)


def can_decode(inputs: DeltaInputs, rows: Rows) -> bool:
    """Say whether `launch_decode` takes these rows: of one token at most, heads of sizes that its programs fill."""
    heads = inputs.heads
    fits = heads.key_dim == 128 and heads.value_dim % (STEPS * PARTS * ROWS_PER_WARP) == 0
    return fits and rows.max_length <= 1 and rows.num_token_lines == 0


def launch_decode(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Run `rows`, for which `can_decode` holds, o `[T, HV, V]`; mutates `lines` and `o`."""
    heads, state_bytes = inputs.heads, lines.state.element_size()
    block_k = ROW_BYTES // state_bytes
    unit, strides = inputs.count_strides(16 // state_bytes)
    num_blocks = heads.value_dim // (STEPS * PARTS * ROWS_PER_WARP)
    _decode_keyed[(rows.num_rows * heads.num_value_heads * num_blocks,)](
        inputs.tokens,
        inputs.gates,
        *lines.arguments(rows, o),
        *inputs.numbers,
        *strides,
        inputs.lower_bound,
        **inputs.sizes,
        RAW=inputs.A_log is None,
        NORM=inputs.normalize,
        **lines.constants,
        UNIT=unit,
        PARTS=PARTS,
        STEPS=STEPS,
        SUB=ROWS_PER_WARP,
        BLOCK_K=block_k,
        LEVELS=(heads.key_dim // block_k).bit_length() - 1,
        num_warps=1,
        num_stages=1,
        maxnreg=MAX_REGISTERS,
    )
