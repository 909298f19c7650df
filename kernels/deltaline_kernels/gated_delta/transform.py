"""T of every chunk of 64 tokens, all at once, in Triton: diag(beta) (I + tril(exp(G_i - G_j) k_i.k_j beta_j, -1))^-1.

With it go the factors that a walk through the chunks needs. k is used as it comes: its norms are exponents, added to
the gates. Nothing here needs q, which crosses memory for a walk alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.chunks import find_chunk
from deltaline_kernels.device.delta_rule.gates import log_decay, strength
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.delta_rule.inverse import invert, places, store_block
from deltaline_kernels.gated_delta.plan import CHUNK
from deltaline_kernels.rows import Rows

# fp32 values of a chunk beside T: four vectors (exponents of the scores' rows and columns, factors of K h^T and of
# Q h^T) and the exponent of the whole chunk's decay.
FACTORS = 4 * CHUNK + 16
SMALLEST_KEY = 64
# A product of blocks of 16 x 16 is the work of one warp, without barriers.
BLOCK = 16
TRANSFORM_WARPS = 1
# Twelve warps at once: 168 us with it, 184 without, for 4 rows of 8192 tokens with 16/32 heads of 128 on an H200.
TRANSFORM_REGISTERS = 168
# Columns of k at once: four threads have a row of them, as in a product's operands.
STRIP = 32
# What decays by more than exp(-40) in one token no longer counts beside anything; so that sums of gates stay small
# enough for their differences.
STRONGEST = tl.constexpr(-40.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_strips(p_first, stride, num_rows, first_k, o_b, K: tl.constexpr, BLOCKS: tl.constexpr, STRIP: tl.constexpr):
    """Return STRIP columns from first_k on of each block of rows, in an order that suits products without exchange.

    Eight neighbours of a row are loaded by one thread, and stay there: a sum of products may take them in any order.
    """
    BLOCK: tl.constexpr = o_b.shape[0]
    o_k = first_k + tl.arange(0, STRIP)[None, :]
    strips = ()
    for i in tl.static_range(BLOCKS):
        o_i = i * BLOCK + o_b[:, None]
        strip = tl.load(p_first + o_i * stride + o_k, mask=(o_i < num_rows) & (o_k < K), other=0.0)
        strip = tl.permute(tl.reshape(strip, (BLOCK, STRIP // 8, 4, 2)), (0, 2, 1, 3))
        strips = strips + (tl.reshape(strip, (BLOCK, STRIP)),)
    return strips


@triton.jit
def _multiply(
    p_first, stride, num_rows, o_b, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, STRIP: tl.constexpr
):
    """Return the products of each block of rows with all up to itself, row by row."""
    products = ()
    for i in tl.static_range(BLOCKS):
        for _ in tl.static_range(i + 1):
            products = products + (tl.zeros((o_b.shape[0], o_b.shape[0]), tl.float32),)
    strips = _load_strips(p_first, stride, num_rows, 0, o_b, K, BLOCKS, STRIP)
    for k in tl.static_range(STRIP, BLOCK_K + STRIP, STRIP):
        ahead = _load_strips(p_first, stride, num_rows, k, o_b, K, BLOCKS, STRIP)
        sums = ()
        for i in tl.static_range(BLOCKS):
            for j in tl.static_range(i + 1):
                sums = sums + (tl.dot(strips[i], tl.trans(strips[j]), acc=products[len(sums)]),)
        products, strips = sums, ahead
    return products


@triton.jit
def _log_norm(square, eps, BLOCK: tl.constexpr):
    """Return minus half the logarithm of the diagonal of square `[BLOCK, BLOCK]`, base 2."""
    o_b = tl.arange(0, BLOCK)
    return -0.5 * tl.log2(tl.sum(tl.where(o_b[:, None] == o_b[None, :], square, 0.0), axis=1) + eps)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["control"])
def _transform(
    tokens,
    gates,
    control,
    transforms,
    factors,
    num_rows,
    scale,
    eps,
    a_stride,
    b_stride,
    strides,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
    HEADS: tl.constexpr,
    RAW: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    GROUP: tl.constexpr = HV // H
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    i_slot = tl.program_id(0) // H
    i_h = tl.program_id(0) % H
    first, end, is_here = find_chunk(control, num_rows, i_slot, CHUNK)
    _, k, _ = tokens
    a, b, A_log, dt_bias = gates
    _, k_stride, _ = strides
    if is_here:
        o_b = places(BLOCK)
        p_k = k + first.to(tl.int64) * k_stride + i_h * K
        # The gates of all value heads of the key head: [HEADS, CHUNK].
        o_c = tl.arange(0, CHUNK)[None, :]
        o_g = tl.arange(0, HEADS)[:, None]
        i_hv = i_h * GROUP + o_g
        in_g = (o_g < GROUP) & (o_c >= 0)
        in_t = in_g & (first + o_c < end)
        b_a = tl.load(a + (first.to(tl.int64) + o_c) * a_stride + i_hv, mask=in_t, other=0.0)
        b_b = tl.load(b + (first.to(tl.int64) + o_c) * b_stride + i_hv, mask=in_t, other=0.0)
        products = _multiply(p_k, k_stride, end - first, o_b, K, BLOCK_K, BLOCKS, STRIP)
        if RAW:
            b_g, b_beta = b_a.to(tl.float32), b_b.to(tl.float32)
        else:
            b_rate = tl.load(A_log + i_hv, mask=o_g < GROUP, other=0.0)
            b_bias = tl.load(dt_bias + i_hv, mask=o_g < GROUP, other=0.0)
            b_g, b_beta = log_decay(b_a, b_rate, b_bias), strength(b_b)
        b_g = tl.where(in_t, tl.maximum(b_g, STRONGEST, propagate_nan=tl.PropagateNan.ALL), 0.0) * LOG2_E
        b_g = tl.cumsum(b_g, axis=1)
        b_beta = tl.where(in_t, b_beta, 0.0)

        # What one thread computes and others need goes through memory: T's own, until it is written.
        slot = i_slot.to(tl.int64) * HV + i_h * GROUP
        p_norm = (transforms + slot * (CHUNK * CHUNK)).to(tl.pointer_type(tl.float32))
        for i in tl.static_range(BLOCKS):
            log_k = tl.zeros((BLOCK,), tl.float32)
            if NORMALIZE:
                log_k = _log_norm(products[i * (i + 1) // 2 + i], eps, BLOCK)
            tl.store(p_norm + i * BLOCK + o_b, log_k)
        tl.debug_barrier()
        g_q = b_g + tl.log2(scale)
        log_k = tl.load(p_norm + o_c)
        if NORMALIZE:
            p_norm += o_b
            cosines = ()
            for i in tl.static_range(BLOCKS):
                norm_i = tl.exp2(tl.load(p_norm + i * BLOCK))[:, None]
                for j in tl.static_range(i + 1):
                    norm_j = tl.exp2(tl.load(p_norm + j * BLOCK))[None, :]
                    cosines = cosines + ((products[i * (i + 1) // 2 + j] * norm_i * norm_j).to(tl.float16),)
            products = cosines
        p_factor = factors + (slot + o_g) * FACTORS + o_c
        tl.store(p_factor, g_q, mask=in_g)
        tl.store(p_factor + CHUNK, b_g - log_k, mask=in_g)
        tl.store(p_factor + 2 * CHUNK, -tl.exp2(b_g + log_k), mask=in_g)
        tl.store(p_factor + 3 * CHUNK, tl.exp2(g_q), mask=in_g)
        tl.store(p_factor + 3 * CHUNK + 1, b_g, mask=in_g & (o_c == CHUNK - 1))
        # What `invert` asks for lies in the right half of T's first rows, zeros in the end: 16 tokens a row.
        tl.debug_barrier()
        p_told = (transforms + (slot + o_g) * (CHUNK * CHUNK)).to(tl.pointer_type(tl.float32))
        p_told += CHUNK // 4 + o_c // BLOCK * (CHUNK // 2) + o_c % BLOCK
        tl.store(p_told, b_g, mask=in_g)
        tl.store(p_told + BLOCKS * (CHUNK // 2), b_beta, mask=in_g)
        tl.debug_barrier()

        for i_head in range(0, GROUP):
            p_transform = transforms + (slot + i_head) * (CHUNK * CHUNK)
            invert(p_transform, products, o_b, BLOCKS, BLOCK)
            tl.debug_barrier()
            for i in tl.static_range(BLOCKS):
                for j in tl.static_range(i + 1, BLOCKS):
                    store_block(p_transform, tl.zeros((BLOCK, BLOCK), tl.float32), o_b, i, j, BLOCK, CHUNK)


def launch_transform(inputs: DeltaInputs, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return T `[slots, HV, CHUNK, CHUNK]` in k's dtype and the factors `[slots, HV, FACTORS]` fp32 of all chunks.

    The chunks of row i have the slots from query_start_loc[i] // CHUNK + i on; the others are left as they are.
    """
    heads, device = inputs.heads, inputs.device
    num_slots = inputs.num_tokens // CHUNK + rows.num_rows
    transforms = torch.empty((num_slots, heads.num_value_heads, CHUNK, CHUNK), dtype=inputs.dtype, device=device)
    factors = torch.empty((num_slots, heads.num_value_heads, FACTORS), dtype=torch.float32, device=device)
    _transform[(num_slots * heads.num_key_heads,)](
        inputs.tokens,
        inputs.gates,
        rows.control,
        transforms,
        factors,
        rows.num_rows,
        *inputs.numbers,
        inputs.strides,
        H=heads.num_key_heads,
        HV=heads.num_value_heads,
        K=heads.key_dim,
        BLOCK_K=max(SMALLEST_KEY, triton.next_power_of_2(heads.key_dim)),
        HEADS=triton.next_power_of_2(heads.group),
        CHUNK=CHUNK,
        FACTORS=FACTORS,
        BLOCK=BLOCK,
        STRIP=STRIP,
        RAW=inputs.A_log is None,
        NORMALIZE=inputs.normalize,
        num_warps=TRANSFORM_WARPS,
        maxnreg=TRANSFORM_REGISTERS,
        num_stages=1,
    )
    return transforms, factors
