"""The gated delta rule token by token in Triton: decode, verify and the replay of accepted drafts in one kernel.

    h = exp(g) h;  u = beta (v - h k);  h += u k^T;  o = h q

A program holds some rows of one head's state in registers: it folds the replayed drafts, stores the state if the row
commits nothing itself, then runs the row's tokens. Decode is a verify of one token that commits it. A verify keeps each
token's u, so that its replay, h = exp(g) h + u k^T, needs no product of the state and leaves what committing leaves, to
the bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.delta_rule.gates import read_gates
from deltaline_kernels.device.delta_rule.inputs import MANY_HEADS, DeltaInputs
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.row import TOKEN_LINES, load_row
from deltaline_kernels.device.state_tile import (
    below,
    fold,
    load_key,
    load_record,
    load_tile,
    load_values,
    multiply,
    scale,
    store_tile,
    to_fp32,
)
from deltaline_kernels.rows import Rows, StateLines

# Bytes of a state's row that 8 threads load at once: whole sectors. A warp has 4 such rows at a time.
ROW_BYTES = 128
ROWS_PER_WARP = 4
# Warps, parts and registers. Of many heads a program takes several parts of the state, so that what a token costs
# beside them is paid once: all the more where rows have several tokens, or where a state of 2 bytes per value, by which
# MANY is keyed, leaves less time. Of few heads that would leave too few programs. The caps let four and two warps share
# the registers of a scheduler. Measurements: docs/log.md.
FEW, MANY, MANY_TOKENS = (2, 1, None), {4: (1, 2, 128), 2: (1, 8, 255)}, (1, 8, 255)
# With larger keys these parts don't fit in the registers: half of them do.
LARGEST_KEY = 128
# Records of accepted drafts loaded at once, while the state is on its way: as many as its registers have room for.
AT_ONCE = tl.constexpr(3)


@triton.jit
def _load_token(
    p_q,
    p_k,
    p_v,
    p_a,
    p_b,
    o_v,
    mask,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return q, k, v and the raw gates of a token of one head, as they come; anything where `mask` is not set."""
    q = load_key(p_q, mask, K, SUB, BLOCK_K)
    k = load_key(p_k, mask, K, SUB, BLOCK_K)
    values = load_values(p_v, mask, o_v, V, PARTS, SUB)
    return q, k, values, tl.load(p_a, mask=mask), tl.load(p_b, mask=mask)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["control_stride", "q_units", "k_units", "v_units"],
    do_not_specialize_on_alignment=["control"],
)
def _recurrent(
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
    TABLE: tl.constexpr,
    ONE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GATES: tl.constexpr = H * K + HV * V
    RECORD: tl.constexpr = GATES + HV
    q, k, v = tokens
    a, b, A_log, dt_bias = gates
    # Multiples of UNIT and, for all the compiler knows, of no more: it loads q and k no wider than the state.
    q_stride, k_stride, v_stride = q_units * UNIT, k_units * UNIT, v_units * UNIT
    NUM_BLOCKS: tl.constexpr = (V + PARTS * SUB - 1) // (PARTS * SUB)
    i_v = tl.program_id(0) % NUM_BLOCKS
    i_hv = tl.program_id(0) // NUM_BLOCKS % HV
    i_row = tl.program_id(0) // (NUM_BLOCKS * HV)
    i_h = i_hv // (HV // H)
    begin, n, read, write, committed, replayed, half = load_row(control, control_stride, i_row)

    o_v = i_v * (PARTS * SUB) + tl.arange(0, SUB)[:, None]
    p_o = o + (begin * HV + i_hv) * V
    if (read == -1) & (write == -1):
        for _ in range(0, n):
            for r in tl.static_range(PARTS):
                o_row = o_v + r * SUB
                tl.store(p_o + o_row, tl.zeros((SUB, 1), o.dtype.element_ty), mask=below(o_row, V, PARTS * SUB))
            p_o += HV * V
        n = 0
    p_state = find_state(lines, read - LINE_SHIFT, i_hv, V * K)
    raw = load_tile(p_state, read > 0, o_v, V, K, PARTS, SUB, BLOCK_K)
    p_q = q + begin * q_stride + i_h * K
    p_k = k + begin * k_stride + i_h * K
    p_v = v + begin * v_stride + i_hv * V
    p_a = a + begin * a_stride + i_hv
    p_b = b + begin * b_stride + i_hv
    b_q, b_k, values, b_a, b_b = _load_token(p_q, p_k, p_v, p_a, p_b, o_v, n > 0, K, V, PARTS, SUB, BLOCK_K)
    b_rate, b_bias = 0.0, 0.0
    if not RAW:
        b_rate = tl.load(A_log + i_hv).to(tl.float32)
        b_bias = tl.load(dt_bias + i_hv).to(tl.float32)

    tile = to_fp32(raw, PARTS * BLOCKS)
    if replayed > 0:
        p_old = find_drafts(lines, read - LINE_SHIFT, half)
        rest = 1.0
        for i in range(0, replayed, AT_ONCE):
            # Several are on their way at once. The last one comes again, which costs no mask.
            waiting = ()
            for j in tl.static_range(AT_ONCE):
                p_record = p_old + tl.minimum(i + j, replayed - 1) * RECORD
                waiting = waiting + (load_record(p_record, i_h, i_hv, o_v, H, HV, K, V, PARTS, SUB, BLOCK_K),)
            for j in tl.static_range(AT_ONCE):
                if i + j < replayed:
                    rest *= tl.exp(waiting[j][2])
                    tile, rest = fold(tile, rest, waiting[j][1], waiting[j][0], PARTS, BLOCKS)
        tile = scale(tile, rest, PARTS * BLOCKS)

    p_new = find_written(lines, write - LINE_SHIFT, i_hv, V * K, APART)
    if (write > 0) & (committed == 0) & ((replayed > 0) | is_elsewhere(read, write, APART)):
        store_tile(p_new, tile, o_v, V, K, PARTS, SUB, BLOCK_K)

    # k is shared by the programs of a key head: one of them records it. The gates are shared by the blocks of V.
    records = (write > 0) & (committed == 0)
    records_gates = records & (i_v == 0)
    records_k = records_gates & (i_hv % (HV // H) == 0)
    p_draft = find_drafts(lines, write - LINE_SHIFT, 1 - half)
    b_q, b_k, values = to_fp32(b_q, BLOCKS), to_fp32(b_k, BLOCKS), to_fp32(values, PARTS)
    b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    rest = 1.0
    for t in range(0, n):
        if not ONE:
            # The last one comes twice, which costs no mask.
            more = t + 1 < n
            p_q += tl.where(more, q_stride, 0)
            p_k += tl.where(more, k_stride, 0)
            p_v += tl.where(more, v_stride, 0)
            p_a += tl.where(more, a_stride, 0)
            p_b += tl.where(more, b_stride, 0)
            following = _load_token(p_q, p_k, p_v, p_a, p_b, o_v, True, K, V, PARTS, SUB, BLOCK_K)
        g, beta = read_gates(b_a, b_b, b_rate, b_bias, RAW)
        rest *= tl.exp(g)
        # The products of the tile don't wait for the norms, which are factors of their sums.
        factor_q, factor_k = query_scale, 1.0
        if NORM:
            factor_q = query_scale * tl.rsqrt(multiply(b_q, 0, b_q, BLOCKS) + eps)
            factor_k = tl.rsqrt(multiply(b_k, 0, b_k, BLOCKS) + eps)
        unit = ()
        for j in tl.static_range(BLOCKS):
            unit = unit + (b_k[j] * factor_k,)
        aligned = multiply(unit, 0, b_q, BLOCKS)
        # h q after the token is the old tile's product and the token's own share: both products of the tile at once.
        outputs = ()
        updates = ()
        for r in tl.static_range(PARTS):
            outputs = outputs + (rest * multiply(tile, r * BLOCKS, b_q, BLOCKS),)
            seen = multiply(tile, r * BLOCKS, b_k, BLOCKS) * factor_k
            updates = updates + (beta * (values[r] - rest * seen),)
        # Nobody reads what the last token of a VERIFY would leave.
        if (t + 1 < n) | (committed > 0):
            tile, rest = fold(tile, rest, updates, unit, PARTS, BLOCKS)
        if TABLE:
            # What is stored is rounded, the tile that goes on is not.
            line = tl.load(control + (TOKEN_LINES + t) * control_stride + i_row).to(tl.int64)
            if line > 0:
                tile, rest = scale(tile, rest, PARTS * BLOCKS), 1.0
                p_token_line = find_written(lines, line - LINE_SHIFT, i_hv, V * K, APART)
                store_tile(p_token_line, tile, o_v, V, K, PARTS, SUB, BLOCK_K)
        for r in tl.static_range(PARTS):
            o_row = o_v + r * SUB
            b_o = tl.fma(updates[r], aligned, outputs[r]) * factor_q
            tl.store(p_o + o_row, b_o.to(o.dtype.element_ty), mask=below(o_row, V, PARTS * SUB))
        p_o += HV * V
        if records:
            if records_k:
                for j in tl.static_range(BLOCKS):
                    o_k = j * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
                    first = (o_v == i_v * (PARTS * SUB)) & (o_k < K)
                    tl.store(p_draft + i_h * K + o_k + 0 * o_v, unit[j], mask=first)
            for r in tl.static_range(PARTS):
                o_row = o_v + r * SUB
                tl.store(p_draft + H * K + i_hv * V + o_row, updates[r], mask=below(o_row, V, PARTS * SUB))
            tl.store(p_draft + GATES + i_hv, g, mask=records_gates)
            p_draft += RECORD
        if not ONE:
            b_q, b_k = to_fp32(following[0], BLOCKS), to_fp32(following[1], BLOCKS)
            values = to_fp32(following[2], PARTS)
            b_a, b_b = following[3].to(tl.float32), following[4].to(tl.float32)

    if (write > 0) & (committed > 0):
        tile = scale(tile, rest, PARTS * BLOCKS)
        store_tile(p_new, tile, o_v, V, K, PARTS, SUB, BLOCK_K)


def launch_recurrent(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Run short rows, which have no waypoints, token by token, o `[T, HV, V]`; mutates `lines` and `o`.

    Arguments are validated by the caller.
    """
    if rows.num_rows == 0:
        return
    heads, state_bytes = inputs.heads, lines.state.element_size()
    # Fewer values than threads would leave two threads with one value of a state that is updated in place.
    block_k = max(16, min(ROW_BYTES // state_bytes, triton.next_power_of_2(heads.key_dim)))
    one = rows.max_length <= 1
    many = rows.num_rows * heads.num_value_heads >= MANY_HEADS
    of_many = MANY[state_bytes] if one else MANY_TOKENS
    num_warps, parts, max_registers = of_many if many else FEW
    if many and heads.key_dim > LARGEST_KEY:
        parts //= 2
    sub = ROWS_PER_WARP * num_warps
    unit, strides = inputs.count_strides(16 // state_bytes)
    _recurrent[(rows.num_rows * heads.num_value_heads * triton.cdiv(heads.value_dim, parts * sub),)](
        inputs.tokens,
        inputs.gates,
        *lines.arguments(rows, o),
        *inputs.numbers,
        *strides,
        **inputs.sizes,
        RAW=inputs.A_log is None,
        NORM=inputs.normalize,
        **lines.constants,
        TABLE=rows.num_token_lines > 0,
        ONE=one,
        UNIT=unit,
        PARTS=parts,
        SUB=sub,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=1,
        maxnreg=max_registers,
    )
