"""The gated delta rule token by token in Triton: decode, verify and the replay of accepted drafts in one kernel.

    h = exp(g) h;  u = beta (v - h k);  h += u k^T;  o = h q

A program holds a [V block, K] tile of one row's state in registers: it folds the replayed drafts, stores the state
if the row commits nothing itself, then runs the row's tokens. Decode is a verify of one token that commits it.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.gated_delta.gates import log_decay, strength
from deltaline_kernels.gated_delta.heads import Heads
from deltaline_kernels.gated_delta.replay import fold_drafts, fold_token
from deltaline_kernels.rows import Rows

BLOCK_V = 32


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride"], do_not_specialize_on_alignment=["control"])
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
    qkv_stride,
    a_stride,
    b_stride,
    control_stride,
    max_draft,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    RECORD: tl.constexpr = H * K + HV * V + 2 * HV
    i_row = tl.program_id(0).to(tl.int64) // HV
    i_hv = tl.program_id(0).to(tl.int64) % HV
    i_v = tl.program_id(1).to(tl.int64)
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

    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = o_k < K
    in_v = o_v < V
    in_h = in_v[:, None] & in_k[None, :]
    o_h = i_hv * (V * K) + o_v[:, None] * K + o_k[None, :]
    b_h = tl.load(state + read * (HV * V * K) + o_h, mask=in_h & (read > 0), other=0.0).to(tl.float32)
    p_old = drafts + (read * 2 + half) * max_draft * RECORD
    b_h = fold_drafts(b_h, p_old, replayed, i_h, i_hv, o_k, o_v, H, HV, K, V)

    p_new = state + write * (HV * V * K) + o_h
    if (write > 0) & (committed == 0) & ((replayed > 0) | (write != read)):
        tl.store(p_new, b_h.to(state.dtype.element_ty), mask=in_h)

    # k is shared by the programs of a key head: one of them records it. The gates are shared by the V blocks.
    records = (write > 0) & (committed == 0)
    records_gates = records & (i_v == 0)
    records_k = records_gates & (i_hv % (HV // H) == 0)
    p_draft = drafts + (write * 2 + 1 - half) * max_draft * RECORD
    p_gate = p_draft + H * K + HV * V + i_hv
    b_rate = tl.load(A_log + i_hv)
    b_bias = tl.load(dt_bias + i_hv)
    p_q = qkv + begin * qkv_stride + i_h * K + o_k
    p_x = qkv + begin * qkv_stride + 2 * H * K + i_hv * V + o_v
    p_a = a + begin * a_stride + i_hv
    p_b = b + begin * b_stride + i_hv
    p_o = o + (begin * HV + i_hv) * V + o_v
    for _ in range(0, n):
        b_q = tl.load(p_q, mask=in_k & live, other=0.0).to(tl.float32)
        b_k = tl.load(p_q + H * K, mask=in_k & live, other=0.0).to(tl.float32)
        b_x = tl.load(p_x, mask=in_v & live, other=0.0).to(tl.float32)
        b_g = log_decay(tl.load(p_a, mask=live, other=0.0), b_rate, b_bias)
        b_beta = strength(tl.load(p_b, mask=live, other=0.0))
        b_q = b_q * (scale / tl.sqrt(tl.sum(b_q * b_q, axis=0) + eps))
        b_k = b_k / tl.sqrt(tl.sum(b_k * b_k, axis=0) + eps)
        b_h = fold_token(b_h, b_k, b_x, b_g, b_beta)
        b_o = tl.where(live, tl.sum(b_h * b_q[None, :], axis=1), 0.0)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=in_v)
        tl.store(p_draft + i_h * K + o_k, b_k, mask=in_k & records_k)
        tl.store(p_draft + H * K + i_hv * V + o_v, b_x, mask=in_v & records)
        tl.store(p_gate, b_g, mask=records_gates)
        tl.store(p_gate + HV, b_beta, mask=records_gates)
        p_q += qkv_stride
        p_x += qkv_stride
        p_a += a_stride
        p_b += b_stride
        p_o += HV * V
        p_draft += RECORD
        p_gate += RECORD

    if (write > 0) & (committed > 0):
        tl.store(p_new, b_h.to(state.dtype.element_ty), mask=in_h)


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
    grid = (rows.num_rows * heads.num_value_heads, triton.cdiv(heads.value_dim, BLOCK_V))
    _recurrent[grid](
        qkv,
        a,
        b,
        A_log,
        dt_bias,
        state,
        drafts,
        o,
        rows.control,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        rows.control.stride(0),
        drafts.shape[2],
        heads.scale,
        heads.eps,
        H=heads.num_key_heads,
        HV=heads.num_value_heads,
        K=heads.key_dim,
        V=heads.value_dim,
        # Fewer values than threads would leave two threads with one value of a state that is updated in place.
        BLOCK_K=max(16, triton.next_power_of_2(heads.key_dim)),
        BLOCK_V=BLOCK_V,
        num_warps=4,
        num_stages=1,
    )
