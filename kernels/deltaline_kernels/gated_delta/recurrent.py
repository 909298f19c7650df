"""The gated delta rule token by token in Triton: decode, verify and the replay of accepted drafts in one kernel.

    h = exp(g) h;  u = beta (v - h k);  h += u k^T;  o = h q

A program holds some rows of one head's state in registers: it folds the replayed drafts, stores the state if the row
commits nothing itself, then runs the row's tokens. Decode is a verify of one token that commits it.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.gated_delta.gates import log_decay, strength
from deltaline_kernels.gated_delta.heads import MANY_HEADS, Heads
from deltaline_kernels.gated_delta.tile import (
    fold_token,
    load_key,
    load_tile,
    load_values,
    multiply,
    store_tile,
)
from deltaline_kernels.rows import Rows

# Bytes of a state's row that 8 threads load at once: whole sectors. A warp has 4 such rows at a time.
ROW_BYTES = 128
ROWS_PER_WARP = 4
# Warps, parts and registers. Of many heads a program takes several parts of the state, so that what a token costs
# beside them is paid once; of few heads that would leave too few programs. The cap lets three warps share the registers
# of a scheduler. Measurements: docs/log.md.
FEW, MANY = (2, 1, None), (1, 4, 168)


@triton.jit
def _load_token(
    qkv,
    a,
    b,
    i_t,
    i_h,
    i_hv,
    o_v,
    mask,
    qkv_stride,
    a_stride,
    b_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return q, k, v and the raw gates of token i_t as they come, zero where `mask` is not set."""
    p_token = qkv + i_t * qkv_stride
    q = load_key(p_token + i_h * K, mask, K, SUB, BLOCK_K)
    k = load_key(p_token + (H + i_h) * K, mask, K, SUB, BLOCK_K)
    values = load_values(p_token + 2 * H * K + i_hv * V, mask, o_v, V, PARTS, SUB)
    b_a = tl.load(a + i_t * a_stride + i_hv, mask=mask, other=0.0)
    b_b = tl.load(b + i_t * b_stride + i_hv, mask=mask, other=0.0)
    return q, k, values, b_a, b_b


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride", "qkv_units"], do_not_specialize_on_alignment=["control"])
def _recurrent(
    qkv,
    a,
    b,
    A_log,
    dt_bias,
    state,
    drafts,
    o,
    control,
    control_stride,
    max_draft,
    scale,
    eps,
    qkv_units,
    a_stride,
    b_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ONE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GATES: tl.constexpr = H * K + HV * V
    RECORD: tl.constexpr = GATES + 2 * HV
    # A multiple of UNIT and, for all the compiler knows, of no more: it loads q and k no wider than the state.
    qkv_stride = qkv_units * UNIT
    i_v = tl.program_id(0)
    i_hv = tl.program_id(1)
    i_row = tl.program_id(2)
    i_h = i_hv // (HV // H)
    begin = tl.load(control + i_row).to(tl.int64)
    n = tl.load(control + i_row + 1) - tl.load(control + i_row)
    read = tl.load(control + control_stride + i_row).to(tl.int64)
    write = tl.load(control + 2 * control_stride + i_row).to(tl.int64)
    committed = tl.load(control + 3 * control_stride + i_row)
    replayed = tl.load(control + 4 * control_stride + i_row)
    half = tl.load(control + 5 * control_stride + i_row).to(tl.int64)
    live = (read != -1) | (write != -1)
    replayed = tl.where(read > 0, replayed, 0)

    o_v = i_v * (PARTS * SUB) + tl.arange(0, SUB)[:, None]
    raw = load_tile(state + (read * HV + i_hv) * (V * K), read > 0, o_v, V, K, PARTS, SUB, BLOCK_K)
    q, k, values, b_a, b_b = _load_token(
        qkv, a, b, begin, i_h, i_hv, o_v, live & (n > 0), qkv_stride, a_stride, b_stride, H, K, V, PARTS, SUB, BLOCK_K
    )
    b_rate = tl.load(A_log + i_hv)
    b_bias = tl.load(dt_bias + i_hv)
    tile = ()
    for j in tl.static_range(PARTS * BLOCKS):
        tile = tile + (raw[j].to(tl.float32),)

    p_old = drafts + (read * 2 + half) * max_draft * RECORD
    for _ in range(0, replayed):
        draft_k = load_key(p_old + i_h * K, True, K, SUB, BLOCK_K)
        draft_values = load_values(p_old + H * K + i_hv * V, True, o_v, V, PARTS, SUB)
        g = tl.load(p_old + GATES + i_hv)
        beta = tl.load(p_old + GATES + HV + i_hv)
        tile, _ = fold_token(tile, draft_k, 1.0, draft_values, g, beta, PARTS, BLOCKS)
        p_old += RECORD

    p_new = state + (write * HV + i_hv) * (V * K)
    if (write > 0) & (committed == 0) & ((replayed > 0) | (write != read)):
        store_tile(p_new, tile, o_v, V, K, PARTS, SUB, BLOCK_K)

    # k is shared by the programs of a key head: one of them records it. The gates are shared by the blocks of V.
    records = (write > 0) & (committed == 0)
    records_gates = records & (i_v == 0)
    records_k = records_gates & (i_hv % (HV // H) == 0)
    p_draft = drafts + (write * 2 + 1 - half) * max_draft * RECORD
    for t in range(0, n):
        if not ONE:
            following = _load_token(
                qkv,
                a,
                b,
                begin + t + 1,
                i_h,
                i_hv,
                o_v,
                live & (t + 1 < n),
                qkv_stride,
                a_stride,
                b_stride,
                H,
                K,
                V,
                PARTS,
                SUB,
                BLOCK_K,
            )
        g = log_decay(b_a, b_rate, b_bias)
        beta = strength(b_b)
        factor_q = scale / tl.sqrt(multiply(q, 0, q, BLOCKS) + eps)
        factor_k = 1.0 / tl.sqrt(multiply(k, 0, k, BLOCKS) + eps)
        aligned = multiply(k, 0, q, BLOCKS)
        # h q after the token is the old tile's product and the token's own share: both products of the tile at once.
        outputs = ()
        for r in tl.static_range(PARTS):
            outputs = outputs + (tl.exp(g) * multiply(tile, r * BLOCKS, q, BLOCKS),)
        tile, updates = fold_token(tile, k, factor_k, values, g, beta, PARTS, BLOCKS)
        p_o = o + ((begin + t) * HV + i_hv) * V
        for r in tl.static_range(PARTS):
            o_row = o_v + r * SUB
            b_o = tl.where(live, (outputs[r] + updates[r] * aligned) * factor_q, 0.0)
            tl.store(p_o + o_row, b_o.to(o.dtype.element_ty), mask=o_row < V)
        if records:
            for j in tl.static_range(BLOCKS):
                o_k = j * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
                first = (o_v == i_v * (PARTS * SUB)) & (o_k < K)
                tl.store(p_draft + i_h * K + o_k + 0 * o_v, k[j].to(tl.float32) * factor_k, mask=first & records_k)
            for r in tl.static_range(PARTS):
                o_row = o_v + r * SUB
                tl.store(p_draft + H * K + i_hv * V + o_row, values[r].to(tl.float32), mask=o_row < V)
            tl.store(p_draft + GATES + i_hv, g, mask=records_gates)
            tl.store(p_draft + GATES + HV + i_hv, beta, mask=records_gates)
            p_draft += RECORD
        if not ONE:
            q, k, values, b_a, b_b = following

    if (write > 0) & (committed > 0):
        store_tile(p_new, tile, o_v, V, K, PARTS, SUB, BLOCK_K)


def launch_recurrent(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    drafts: Tensor,
    rows: Rows,
    o: Tensor,
    heads: Heads,
) -> None:
    """Run `rows` token by token. Mutates `state`, `drafts` and `o`."""
    if rows.num_rows == 0:
        return
    # Fewer values than threads would leave two threads with one value of a state that is updated in place.
    block_k = max(16, min(ROW_BYTES // state.element_size(), triton.next_power_of_2(heads.key_dim)))
    many = rows.num_rows * heads.num_value_heads >= MANY_HEADS
    num_warps, parts, max_registers = MANY if many else FEW
    sub = ROWS_PER_WARP * num_warps
    unit = math.gcd(16 // state.element_size(), qkv.stride(0))
    _recurrent[(triton.cdiv(heads.value_dim, parts * sub), heads.num_value_heads, rows.num_rows)](
        qkv,
        a,
        b,
        A_log,
        dt_bias,
        state,
        drafts,
        o,
        rows.control,
        rows.control.stride(0),
        drafts.shape[2],
        heads.scale,
        heads.eps,
        qkv.stride(0) // unit,
        a.stride(0),
        b.stride(0),
        H=heads.num_key_heads,
        HV=heads.num_value_heads,
        K=heads.key_dim,
        V=heads.value_dim,
        ONE=rows.max_length <= 1,
        UNIT=unit,
        PARTS=parts,
        SUB=sub,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=1,
        maxnreg=max_registers,
    )
