"""The gated delta rule in chunks of 64 tokens, for long rows of 16-bit values, in Triton.

Within a chunk, with G_i = g_1 + .. + g_i and h the state before it:

    T = (I + tril(beta_i exp(G_i - G_j) k_i.k_j, -1))^-1 diag(beta)
    U = T (V - exp(G) K h^T)
    o = exp(G) Q h^T + tril(exp(G_i - G_j) q_i.k_j) U
    h = exp(G_C) h + U^T (exp(G_C - G_j) k_j)

Two launches. `_transform` computes T, the only matrix that crosses memory, for all chunks at once. `_advance` walks
through the chunks of a row with a block of its state in registers. q and k are used as they come: their norms are
factors of rows and columns of the products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.gated_delta.gates import log_decay, strength
from deltaline_kernels.gated_delta.heads import FEW_PROGRAMS, Heads
from deltaline_kernels.gated_delta.replay import fold_drafts
from deltaline_kernels.rows import Rows

CHUNK = 64
# Smaller blocks of a state gave wrong values with Triton 3.6 on Hopper.
BLOCK_V = 64
SMALLEST_KEY = 64
TRANSFORM_WARPS, ADVANCE_WARPS = 2, 4
STAGES_OF_FEW = 3
ROWS_AT_ONCE = tl.constexpr(128)
# What decays by more than exp(-40) in one token no longer counts beside anything; so that sums of gates stay small
# enough for their differences.
STRONGEST = tl.constexpr(-40.0)


@triton.jit
def _eliminate(inverse, coupling, o_i, o_j, SIZE: tl.constexpr):
    """Return the inverse of I + coupling on diagonal blocks of SIZE, given that on blocks of half the size.

    A block is [[X, 0], [N, Y]]; its inverse has -Y^-1 N X^-1 below the inverses of X and Y. No value exceeds 1, since
    each is a product of contractions: fp16 holds them as well as TF32 does, and is multiplied twice as fast.
    """
    below = (o_i // SIZE == o_j // SIZE) & (o_i // (SIZE // 2) != o_j // (SIZE // 2))
    operand = inverse.to(tl.float16)
    known = tl.dot(tl.where(below, coupling, 0.0).to(tl.float16), operand)
    return inverse - tl.dot(operand, known.to(tl.float16))


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride", "num_rows"], do_not_specialize_on_alignment=["control"])
def _transform(
    qkv,
    a,
    b,
    A_log,
    dt_bias,
    control,
    transforms,
    vectors,
    control_stride,
    num_rows,
    eps,
    qkv_stride,
    a_stride,
    b_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    GROUP: tl.constexpr = HV // H
    BLOCKS: tl.constexpr = CHUNK // 16
    i_slot = tl.program_id(0)
    i_h = tl.program_id(1)
    # Row i has the slots from begin // CHUNK + i on: enough for each, and none twice.
    i_row = -1
    o_row = tl.arange(0, ROWS_AT_ONCE)
    for i in range(0, num_rows, ROWS_AT_ONCE):
        slots = tl.load(control + i + o_row, mask=i + o_row < num_rows, other=0x7FFFFFFF) // CHUNK + i + o_row
        i_row += tl.sum((slots <= i_slot).to(tl.int32), 0)
    if i_row >= 0:
        begin = tl.load(control + i_row).to(tl.int64)
        n = (tl.load(control + i_row + 1) - begin).to(tl.int32)
        first = (i_slot - i_row - (begin // CHUNK).to(tl.int32)) * CHUNK
        if first < n:
            read = tl.load(control + control_stride + i_row)
            write = tl.load(control + 2 * control_stride + i_row)
            live = (read != -1) | (write != -1)
            o_c = tl.arange(0, CHUNK)
            o_k = tl.arange(0, BLOCK_K)
            in_t = (first + o_c < n) & live
            p_token = qkv + (begin + first) * qkv_stride + i_h * K
            p_q = p_token + o_c[:, None] * qkv_stride + o_k[None, :]
            in_tile = in_t[:, None] & (o_k < K)[None, :]
            b_q = tl.load(p_q, mask=in_tile, other=0.0).to(tl.float32)
            factor_q = 1.0 / tl.sqrt(tl.sum(b_q * b_q, axis=1) + eps)
            b_k = tl.load(p_q + H * K, mask=in_tile, other=0.0)
            factor_k = 1.0 / tl.sqrt(tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), axis=1) + eps)
            products = tl.dot(b_k, tl.trans(b_k)) * factor_k[:, None] * factor_k[None, :]
            # The diagonal blocks once more, on their own: [BLOCKS, 16, 16].
            o_b = tl.arange(0, BLOCKS)[:, None] * 16 + tl.arange(0, 16)[None, :]
            p_block = p_token + H * K + o_b[:, :, None] * qkv_stride + o_k[None, None, :]
            in_block = ((first + o_b < n) & live)[:, :, None] & (o_k < K)[None, None, :]
            b_blocks = tl.load(p_block, mask=in_block, other=0.0)
            factor_block = tl.reshape(factor_k, (BLOCKS, 16))
            block_products = tl.dot(b_blocks, tl.permute(b_blocks, (0, 2, 1)))
            block_products = block_products * factor_block[:, :, None] * factor_block[:, None, :]

            o_i, o_j = o_c[:, None], o_c[None, :]
            o_bi, o_bj = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
            same = (tl.arange(0, BLOCKS)[:, None] == tl.arange(0, BLOCKS)[None, :])[:, None, :, None]
            for i in range(0, GROUP):
                i_hv = i_h * GROUP + i
                b_a = tl.load(a + (begin + first + o_c) * a_stride + i_hv, mask=in_t, other=0.0)
                b_b = tl.load(b + (begin + first + o_c) * b_stride + i_hv, mask=in_t, other=0.0)
                b_g = tl.maximum(log_decay(b_a, tl.load(A_log + i_hv), tl.load(dt_bias + i_hv)), STRONGEST)
                b_g = tl.cumsum(tl.where(in_t, b_g, 0.0), axis=0)
                b_beta = tl.where(in_t, strength(b_b), 0.0)
                coupling = products * tl.exp(tl.minimum(b_g[:, None] - b_g[None, :], 0.0)) * b_beta[:, None]
                coupling = tl.where(o_i > o_j, coupling, 0.0)
                g_block = tl.reshape(b_g, (BLOCKS, 16))
                block = block_products * tl.exp(tl.minimum(g_block[:, :, None] - g_block[:, None, :], 0.0))
                block = tl.where(o_bi > o_bj, block * tl.reshape(b_beta, (BLOCKS, 16))[:, :, None], 0.0)
                inverse = tl.where(o_bi == o_bj, 1.0, 0.0) - tl.where(o_bi // 2 == o_bj // 2, block, 0.0)
                inverse = _eliminate(inverse, block, o_bi, o_bj, 4)
                inverse = _eliminate(inverse, block, o_bi, o_bj, 8)
                inverse = _eliminate(inverse, block, o_bi, o_bj, 16)
                whole = tl.reshape(tl.where(same, tl.expand_dims(inverse, 2), 0.0), (CHUNK, CHUNK))
                whole = _eliminate(whole, coupling, o_i, o_j, 32)
                whole = _eliminate(whole, coupling, o_i, o_j, 64)
                slot = i_slot.to(tl.int64) * HV + i_hv
                p_transform = transforms + slot * (CHUNK * CHUNK) + o_i * CHUNK + o_j
                tl.store(p_transform, (whole * b_beta[None, :]).to(transforms.dtype.element_ty))
                p_vector = vectors + slot * (3 * CHUNK) + o_c
                tl.store(p_vector, b_g)
                tl.store(p_vector + CHUNK, factor_k)
                tl.store(p_vector + 2 * CHUNK, factor_q)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride"], do_not_specialize_on_alignment=["control"])
def _advance(
    qkv,
    transforms,
    vectors,
    state,
    drafts,
    o,
    control,
    control_stride,
    max_draft,
    scale,
    qkv_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    RECORD: tl.constexpr = H * K + HV * V + 2 * HV
    dtype: tl.constexpr = qkv.dtype.element_ty
    i_v = tl.program_id(0)
    i_hv = tl.program_id(1)
    i_row = tl.program_id(2)
    i_h = i_hv // (HV // H)
    begin = tl.load(control + i_row).to(tl.int64)
    n = (tl.load(control + i_row + 1) - begin).to(tl.int32)
    read = tl.load(control + control_stride + i_row).to(tl.int64)
    write = tl.load(control + 2 * control_stride + i_row).to(tl.int64)
    replayed = tl.load(control + 4 * control_stride + i_row)
    half = tl.load(control + 5 * control_stride + i_row).to(tl.int64)
    live = (read != -1) | (write != -1)
    replayed = tl.where(read > 0, replayed, 0)

    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_c = tl.arange(0, CHUNK)
    in_k = o_k < K
    in_v = o_v < V
    in_h = in_v[:, None] & in_k[None, :]
    o_h = o_v[:, None] * K + o_k[None, :]
    b_start = tl.load(state + (read * HV + i_hv) * (V * K) + o_h, mask=in_h & (read > 0), other=0.0).to(tl.float32)
    p_old = drafts + (read * 2 + half) * max_draft * RECORD
    b_start = fold_drafts(b_start, p_old, replayed, i_h, i_hv, o_k, o_v, H, HV, K, V)
    b_h = tl.trans(b_start)  # (BLOCK_K, BLOCK_V)

    slot = (begin // CHUNK + i_row) * HV + i_hv
    p_transform = transforms + slot * (CHUNK * CHUNK) + o_c[:, None] * CHUNK + o_c[None, :]
    p_vector = vectors + slot * (3 * CHUNK)
    p_qk = qkv + (begin + o_c)[:, None] * qkv_stride + i_h * K + o_k[None, :]
    p_x = qkv + (begin + o_c)[:, None] * qkv_stride + 2 * H * K + i_hv * V + o_v[None, :]
    p_o = o + ((begin + o_c)[:, None] * HV + i_hv) * V + o_v[None, :]
    seen = o_c[:, None] >= o_c[None, :]
    for first in tl.range(0, n, CHUNK, num_stages=STAGES):
        in_t = (first + o_c < n) & live
        b_q = tl.load(p_qk, mask=in_t[:, None] & in_k[None, :], other=0.0)
        b_k = tl.load(p_qk + H * K, mask=in_t[:, None] & in_k[None, :], other=0.0)
        b_x = tl.load(p_x, mask=in_t[:, None] & in_v[None, :], other=0.0)
        b_t = tl.load(p_transform)
        b_g = tl.load(p_vector + o_c)
        factor_k = tl.load(p_vector + CHUNK + o_c)
        factor_q = tl.load(p_vector + 2 * CHUNK + o_c)
        b_last = tl.load(p_vector + CHUNK - 1)
        b_decay = tl.exp(b_g)

        b_hd = b_h.to(dtype)
        b_r = b_x.to(tl.float32) - (b_decay * factor_k)[:, None] * tl.dot(b_k, b_hd)
        b_u = tl.dot(b_t, b_r.to(dtype))  # (CHUNK, BLOCK_V)
        b_scores = tl.dot(b_q, tl.trans(b_k)) * tl.exp(tl.minimum(b_g[:, None] - b_g[None, :], 0.0)) * factor_k[None, :]
        b_scores = tl.where(seen, b_scores, 0.0)
        b_o = tl.dot(b_q, b_hd) * b_decay[:, None]
        b_o += tl.dot(b_scores.to(dtype), b_u.to(dtype))
        b_o *= (factor_q * scale)[:, None]
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=(first + o_c < n)[:, None] & in_v[None, :])
        b_w = (b_u * (tl.exp(b_last - b_g) * factor_k)[:, None]).to(dtype)
        b_h = b_h * tl.exp(b_last) + tl.dot(tl.trans(b_k), b_w)
        p_qk += CHUNK * qkv_stride
        p_x += CHUNK * qkv_stride
        p_o += CHUNK * HV * V
        p_transform += HV * CHUNK * CHUNK
        p_vector += HV * 3 * CHUNK

    # An empty row changes its line only by a replay or by a move.
    if (write > 0) & ((n > 0) | (replayed > 0) | (write != read)):
        p_new = state + (write * HV + i_hv) * (V * K) + o_h
        tl.debug_barrier()
        tl.store(p_new, tl.trans(b_h).to(state.dtype.element_ty), mask=in_h)


def launch_chunk(
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
    """Run `rows` of 16-bit values, none of which is a VERIFY, in chunks. Mutates `state` and `o`."""
    if rows.num_rows == 0:
        return
    num_slots = qkv.shape[0] // CHUNK + rows.num_rows
    num_heads, control = heads.num_value_heads, rows.control
    transforms = torch.empty((num_slots, num_heads, CHUNK, CHUNK), dtype=qkv.dtype, device=qkv.device)
    vectors = torch.empty((num_slots, num_heads, 3, CHUNK), dtype=torch.float32, device=qkv.device)
    sizes = {"H": heads.num_key_heads, "HV": num_heads, "K": heads.key_dim, "CHUNK": CHUNK}
    sizes["BLOCK_K"] = max(SMALLEST_KEY, triton.next_power_of_2(heads.key_dim))
    _transform[(num_slots, heads.num_key_heads)](
        qkv,
        a,
        b,
        A_log,
        dt_bias,
        control,
        transforms,
        vectors,
        control.stride(0),
        rows.num_rows,
        heads.eps,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        **sizes,
        num_warps=TRANSFORM_WARPS,
        num_stages=1,
    )
    blocks = triton.cdiv(heads.value_dim, BLOCK_V)
    stages = STAGES_OF_FEW if blocks * num_heads * rows.num_rows <= FEW_PROGRAMS else 1
    _advance[(blocks, num_heads, rows.num_rows)](
        qkv,
        transforms,
        vectors,
        state,
        drafts,
        o,
        control,
        control.stride(0),
        drafts.shape[2],
        heads.scale,
        qkv.stride(0),
        **sizes,
        V=heads.value_dim,
        BLOCK_V=BLOCK_V,
        STAGES=stages,
        num_warps=ADVANCE_WARPS,
        num_stages=stages,
    )
