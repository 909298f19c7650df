"""What chunks of 64 tokens of KDA are without a state before them, all chunks at once, in Triton.

With G_i = g_1 + .. + g_i per key channel, and S_ij = G_i - G_j, of normalised q and k:

    A_ij = sum over channels of exp(S_ij) k_i k_j;  T = (I + diag(beta) tril(A, -1))^-1 diag(beta)
    scores = tril(sum over channels of exp(S_ij) q_i k_j)
    queries = exp(G_i) q_i;  keys = -exp(G_i) k_i;  rests = exp(S_Cj) k_j;  total = exp(G_C)

exp(G_i) exp(-G_j) would overflow with strong decays. So pairs are cut by their last common block of 2, 4, .. 64 tokens:
exp(S_ij) is what i has lost since the middle of that block times what j loses until there, neither above 1, and the
pairs of one size of block are one product. Sums of gates are products with zeros and ones: no difference cancels.

`launch_transform` finds all that in two launches: T is what `_invert` makes of A, which waits in T's memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.chunks import find_chunk
from deltaline_kernels.device.delta_rule.gates import key_log_decay, read_strength
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.delta_rule.inverse import invert, places, store_block
from deltaline_kernels.kda.hopper_transform import fits_hopper, launch_pairs
from deltaline_kernels.kda.plan import CHUNK
from deltaline_kernels.rows import Rows

# Halves of blocks: of 2, 4, .. 64 tokens.
LEVELS = tl.constexpr(6)
SMALLEST_KEY = 16
# Key channels at once. With two warps products are synchronous: see chunk.py.
STRIP, WARPS = 32, 2
# Of blocks of A, and for their inverse.
BLOCK, INVERT_REGISTERS = 16, 168
# A log decay below this leaves nothing either, and times 0 it is 0.
LOWEST = tl.constexpr(-1e4)
# The bits of fp32 that a matrix instruction reads as TF32.
TF32_BITS = tl.constexpr(-(2**13))


class Chunks(NamedTuple):
    """Of each slot and value head: queries, keys and rests `[slots, HV, CHUNK, K]`, scores and T `[slots, HV, CHUNK,
    CHUNK]` in the tokens' dtype, and total `[slots, HV, K]` fp32.
    """

    queries: Tensor
    keys: Tensor
    rests: Tensor
    scores: Tensor
    transforms: Tensor
    total: Tensor


@triton.jit
def _sum_gates(which, high, low):
    """Return the sums of gates, high + low, that `which` `[CHUNK, CHUNK]` tells: exact to about 2^-20."""
    chosen = which.to(tl.float32)
    return tl.dot(chosen, low, acc=tl.dot(chosen, high, input_precision="tf32"), input_precision="tf32")


@triton.jit
def _fade(o_i, o_j, g, high, low, half: tl.constexpr):
    """Return what channels lose between each token and the middle of its block of 2 * half tokens, `[CHUNK, STRIP]`."""
    is_right = (o_i & half) > 0
    if half == 1:
        return tl.exp(tl.where(is_right, g, 0.0))
    else:
        same = (o_i // half) == (o_j // half)
        between = same & ((is_right & (o_j <= o_i)) | (((o_i & half) == 0) & (o_j > o_i)))
        return tl.exp(_sum_gates(between, high, low))


@triton.jit
def _is_cut(o_i, o_j, half: tl.constexpr):
    """Return where the middle of a block of 2 * half tokens is between a token of a row and one of a column before."""
    return (o_i // (2 * half) == o_j // (2 * half)) & ((o_i & half) > (o_j & half))


@triton.jit
def _inverse_norm(p_x, stride, in_t, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return 1 / |x| of the tokens' K channels at p_x `[CHUNK, 1]`, as their rows are `stride` apart."""
    o_k = tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(p_x + o_k, mask=in_t & (o_k < K), other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=1) + eps)[:, None]


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["control"])
def _transform(
    tokens,
    gates,
    control,
    chunks,
    num_rows,
    query_scale,
    eps,
    a_stride,
    strides,
    lower_bound,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
    RAW: tl.constexpr,
    NORM: tl.constexpr,
):
    q, k, _ = tokens
    a, _, A_log, dt_bias = gates
    queries, keys, rests, all_scores, transforms, total = chunks
    dtype: tl.constexpr = queries.dtype.element_ty
    q_stride, k_stride, _ = strides
    i_slot = tl.program_id(0) // HV
    i_hv = tl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    first, end, is_here = find_chunk(control, num_rows, i_slot, CHUNK)
    if is_here:
        o_c = tl.arange(0, CHUNK)
        o_i, o_j = o_c[:, None], o_c[None, :]
        in_t = first + o_i < end
        t = (first + o_i).to(tl.int64)
        p_q = q + t * q_stride + i_h * K
        p_k = k + t * k_stride + i_h * K
        p_a = a + t * a_stride + i_hv * K
        place = tl.program_id(0).to(tl.int64)
        factor_q, factor_k = query_scale, 1.0
        if NORM:
            factor_q = query_scale * _inverse_norm(p_q, q_stride, in_t, eps, K, BLOCK_K)
            factor_k = _inverse_norm(p_k, k_stride, in_t, eps, K, BLOCK_K)
        b_rate = 0.0
        if not RAW:
            b_rate = tl.load(A_log + i_hv).to(tl.float32)

        system = tl.zeros((CHUNK, CHUNK), tl.float32)
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        for i_k in range(0, BLOCK_K, STRIP):
            o_k = i_k + tl.arange(0, STRIP)[None, :]
            inside = in_t & (o_k < K)
            b_q = tl.load(p_q + o_k, mask=inside, other=0.0).to(tl.float32) * factor_q
            b_k = tl.load(p_k + o_k, mask=inside, other=0.0).to(tl.float32) * factor_k
            b_bias = 0.0
            if not RAW:
                b_bias = tl.load(dt_bias + i_hv * K + o_k, mask=o_k < K, other=0.0)
            g = key_log_decay(tl.load(p_a + o_k, mask=inside, other=0.0), b_rate, b_bias, lower_bound, RAW)
            g = tl.where(inside, tl.where(g < LOWEST, LOWEST, g), 0.0)
            high = (g.to(tl.int32, bitcast=True) & TF32_BITS).to(tl.float32, bitcast=True)
            low = g - high

            scores += tl.where(o_i == o_j, tl.sum(b_q * b_k, axis=1)[:, None], 0.0)
            for level in tl.static_range(LEVELS):
                fade = _fade(o_i, o_j, g, high, low, 1 << level)
                is_cut = _is_cut(o_i, o_j, 1 << level)
                right = tl.trans(b_k * fade)
                system += tl.where(is_cut, tl.dot(b_k * fade, right, input_precision="tf32"), 0.0)
                scores += tl.where(is_cut, tl.dot(b_q * fade, right, input_precision="tf32"), 0.0)

            before = tl.exp(_sum_gates(o_j <= o_i, high, low))
            behind = tl.exp(_sum_gates(o_j > o_i, high, low))
            o_x = (place * CHUNK + o_i) * K + o_k
            in_x = (o_i >= 0) & (o_k < K)
            tl.store(queries + o_x, (b_q * before).to(dtype), mask=in_x)
            tl.store(keys + o_x, (-b_k * before).to(dtype), mask=in_x)
            tl.store(rests + o_x, (b_k * behind).to(dtype), mask=in_x)
            o_total = i_k + tl.arange(0, STRIP)
            tl.store(total + place * K + o_total, tl.exp(tl.sum(g, axis=0)), mask=o_total < K)

        o_m = (place * CHUNK + o_i) * CHUNK + o_j
        tl.store(all_scores + o_m, scores.to(dtype))
        p_pairs = transforms.to(tl.pointer_type(tl.float16)) + o_m
        tl.store(p_pairs, system.to(tl.float16), mask=o_i >= o_j)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["control"])
def _invert(
    b,
    control,
    transforms,
    num_rows,
    b_stride,
    HV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    RAW: tl.constexpr,
):
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    i_slot = tl.program_id(0) // HV
    i_hv = tl.program_id(0) % HV
    first, end, is_here = find_chunk(control, num_rows, i_slot, CHUNK)
    if is_here:
        o_b = places(BLOCK)
        p_transform = transforms + tl.program_id(0).to(tl.int64) * (CHUNK * CHUNK)
        p_pairs = p_transform.to(tl.pointer_type(tl.float16))
        pairs = ()
        for i in tl.static_range(BLOCKS):
            for j in tl.static_range(i + 1):
                o_i, o_j = i * BLOCK + o_b[:, None], j * BLOCK + o_b[None, :]
                # As a symmetric matrix, of which only the lower half is there.
                pairs = pairs + (tl.load(p_pairs + tl.maximum(o_i, o_j) * CHUNK + tl.minimum(o_i, o_j)),)
        # Behind the row's end keys and values are zero, and so is what any strength makes of them.
        o_c = tl.arange(0, CHUNK)
        p_b = b + (first + o_c).to(tl.int64) * b_stride + i_hv
        beta = read_strength(tl.load(p_b, mask=first + o_c < end, other=0.0), RAW)
        # What `invert` asks for lies in the right half of T's first rows, zeros in the end: 16 tokens a row. The decays
        # are in A already.
        p_told = p_transform.to(tl.pointer_type(tl.float32))
        p_told += CHUNK // 4 + o_c // BLOCK * (CHUNK // 2) + o_c % BLOCK
        tl.store(p_told, tl.zeros((CHUNK,), tl.float32))
        tl.store(p_told + BLOCKS * (CHUNK // 2), beta)
        tl.debug_barrier()
        invert(p_transform, pairs, o_b, BLOCKS, BLOCK)
        tl.debug_barrier()
        for i in tl.static_range(BLOCKS):
            for j in tl.static_range(i + 1, BLOCKS):
                store_block(p_transform, tl.zeros((BLOCK, BLOCK), tl.float32), o_b, i, j, BLOCK, CHUNK)


def launch_transform(inputs: DeltaInputs, rows: Rows) -> Chunks:
    """Return what the chunks of `rows` of 16-bit values are.

    Those of row i have the slots from query_start_loc[i] // CHUNK + i on; the others are left as they are.
    """
    heads, device, dtype = inputs.heads, inputs.device, inputs.dtype
    num_slots, num_heads, key_dim = inputs.num_tokens // CHUNK + rows.num_rows, heads.num_value_heads, heads.key_dim
    wide, square = (3, num_slots, num_heads, CHUNK, key_dim), (2, num_slots, num_heads, CHUNK, CHUNK)
    queries, keys, rests = torch.empty(wide, dtype=dtype, device=device).unbind()
    scores, transforms = torch.empty(square, dtype=dtype, device=device).unbind()
    total = torch.empty((num_slots, num_heads, key_dim), dtype=torch.float32, device=device)
    chunks = Chunks(queries, keys, rests, scores, transforms, total)
    block_k = max(SMALLEST_KEY, triton.next_power_of_2(key_dim))
    scale, eps, a_stride, b_stride = inputs.numbers
    if fits_hopper(inputs):
        launch_pairs(inputs, rows, tuple(chunks))
    else:
        _transform[(num_slots * num_heads,)](
            inputs.tokens,
            inputs.gates,
            rows.control,
            tuple(chunks),
            rows.num_rows,
            scale,
            eps,
            a_stride,
            inputs.strides,
            inputs.lower_bound,
            H=heads.num_key_heads,
            HV=num_heads,
            K=key_dim,
            BLOCK_K=block_k,
            CHUNK=CHUNK,
            STRIP=min(STRIP, block_k),
            RAW=inputs.A_log is None,
            NORM=inputs.normalize,
            num_warps=WARPS,
            num_stages=1,
        )
    _invert[(num_slots * num_heads,)](
        inputs.b,
        rows.control,
        transforms,
        rows.num_rows,
        b_stride,
        HV=num_heads,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        RAW=inputs.A_log is None,
        num_warps=1,
        num_stages=1,
        maxnreg=INVERT_REGISTERS,
    )
    return chunks
