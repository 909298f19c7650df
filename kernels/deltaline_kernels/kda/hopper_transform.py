"""What transform.py's `_transform` finds, for Hopper, in Gluon: the same products, asynchronous.

A program has a chunk of one head. A thread has two key channels of a block of 8 tokens: what their gates add up to is
its own. Pairs of 16 tokens are cut as transform.py says; where log decays have a bound, they are one product, as then
what 8 tokens leave has an inverse. Only for keys of 64 or 128.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from deltaline_kernels.device.chunks import FAR, ROWS_AT_ONCE
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.hopper import barrier, on_hopper
from deltaline_kernels.kda.plan import CHUNK
from deltaline_kernels.rows import Rows

KEYS = (64, 128)
# Log decays of at least that: e^40 of 8 tokens is far from the bounds of bf16.
LOWEST_BOUND = -5.0
# What decays by more than 2^-40 in one token no longer counts beside anything; so that sums of gates stay small enough
# for their differences.
STRONGEST = gl.constexpr(-40.0)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def find_chunk(control, num_rows, i_slot, CHUNK: gl.constexpr, WARPS: gl.constexpr):
    """Return what device/chunks.py's `find_chunk` does."""
    o_row = gl.arange(0, ROWS_AT_ONCE, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))
    i_row, begin, end = -1, 0, FAR
    for known in range(0, num_rows + 1, ROWS_AT_ONCE):
        starts = gl.load(control + known + o_row, mask=known + o_row <= num_rows, other=FAR)
        is_before = starts // CHUNK + known + o_row <= i_slot
        i_row += gl.sum(is_before.to(gl.int32), 0)
        begin = gl.maximum(begin, gl.max(gl.where(is_before, starts, 0), 0))
        end = gl.minimum(end, gl.min(gl.where(is_before, FAR, starts), 0))
    first = (i_slot - i_row - begin // CHUNK) * CHUNK + begin
    return first, end, (i_row >= 0) & (i_row < num_rows) & (first < end)


@gluon.jit
def _inverse_norms(p_x, stride, num_tokens, eps, K: gl.constexpr, CHUNK: gl.constexpr, WARPS: gl.constexpr):
    """Return 1 / |x| of CHUNK tokens' K channels from p_x on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0])
    o_c = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))[:, None]
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, layout))[None, :]
    x = gl.load(p_x + o_c * stride + o_k, mask=(o_c < num_tokens) & (o_k >= 0), other=0.0).to(gl.float32)
    return gl.rsqrt(gl.sum(x * x, 1) + eps)


@gluon.jit
def _gate(a, rate, bias, bound, RAW: gl.constexpr):
    """Return log decays, base 2; those of gates.py's `key_log_decay`."""
    if RAW:
        return a * LOG2_E
    else:
        x = (a + bias) * LOG2_E
        if bound is None:
            # Beside e^20 nobody sees the 1.
            return -rate * gl.where(x > 30.0, x, gl.log2(1.0 + gl.exp2(x)))
        else:
            root = gl.rsqrt(1.0 + gl.exp2(-rate * x))
            return (bound * LOG2_E) * root * root


@gluon.jit
def _fade(k_s, q_s, b_k, b_q, left_over):
    """Store k and q `[BLOCKS, 8, K]` times what is left of them for a product."""
    k_s.store(gl.reshape((b_k * left_over).to(k_s.dtype), k_s.shape))
    q_s.store(gl.reshape((b_q * left_over).to(q_s.dtype), q_s.shape))


@gluon.jit
def _multiply_faded(k_s, q_s, b_k, b_q, left_over, mma_c: gl.constexpr):
    """Return the products of k and of q with k, times what is left of them."""
    barrier()
    _fade(k_s, q_s, b_k, b_q, left_over)
    fence_async_shared()
    barrier()
    CHUNK: gl.constexpr = k_s.shape[0]
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, mma_c)
    pairs = warpgroup_mma(k_s, k_s.permute((1, 0)), zero, use_acc=False)
    scores = warpgroup_mma(q_s, k_s.permute((1, 0)), zero, use_acc=False)
    return pairs, scores


@gluon.jit
def _add_blocks(each, chosen, tile: gl.constexpr):
    """Return for each block the sum of those of each `[1, BLOCKS, K]` that are chosen for it, `[BLOCKS, 1, K]`."""
    # -0.0 adds nothing to anything: where all or none are chosen nothing is left of it.
    picked = gl.sum(gl.where(chosen, each, -0.0), 1)
    return gl.expand_dims(gl.convert_layout(picked, gl.SliceLayout(1, tile)), 1)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["control"])
def pair_kernel(
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
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    CHUNK: gl.constexpr,
    RAW: gl.constexpr,
    NORM: gl.constexpr,
    # What 8 tokens leave has an inverse.
    SAFE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Find what a chunk of a head is without a state before it; T's memory gets the lower half of A, fp16."""
    BLOCKS: gl.constexpr = CHUNK // 8
    tile: gl.constexpr = gl.BlockedLayout([1, 8, 2], [1, 1, 32], [BLOCKS, 1, WARPS // BLOCKS], [2, 1, 0])
    pair: gl.constexpr = gl.BlockedLayout([1, BLOCKS, 2], [1, 1, 32], [BLOCKS, 1, WARPS // BLOCKS], [2, 1, 0])
    mma_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, CHUNK * 4 // WARPS, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q, k, _ = tokens
    a, _, A_log, dt_bias = gates
    queries, keys, rests, all_scores, transforms, total = chunks
    dtype: gl.constexpr = queries.dtype.element_ty
    q_stride, k_stride, _ = strides
    i_slot = gl.program_id(0) // HV
    i_hv = gl.program_id(0) % HV
    i_h = i_hv // (HV // H)
    first, end, is_here = find_chunk(control, num_rows, i_slot, CHUNK, WARPS)
    if is_here:
        o_b = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, tile)))[:, None, None]
        o_i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, tile)))[None, :, None]
        o_k = gl.arange(0, K, layout=gl.SliceLayout(0, gl.SliceLayout(1, tile)))[None, None, :]
        o_t = o_b * 8 + o_i
        num_tokens = end - first
        inside = (o_t < num_tokens) & (o_k >= 0)
        p_q = q + first.to(gl.int64) * q_stride + i_h * K
        p_k = k + first.to(gl.int64) * k_stride + i_h * K
        p_a = a + first.to(gl.int64) * a_stride + i_hv * K
        g = gl.load(p_a + o_t * a_stride + o_k, mask=inside, other=0.0).to(gl.float32)
        b_q = gl.load(p_q + o_t * q_stride + o_k, mask=inside, other=0.0).to(gl.float32)
        b_k = gl.load(p_k + o_t * k_stride + o_k, mask=inside, other=0.0).to(gl.float32)
        rate, bias = 0.0, 0.0
        if not RAW:
            rate = gl.exp(gl.load(A_log + i_hv).to(gl.float32))
            bias = gl.load(dt_bias + i_hv * K + o_k).to(gl.float32)
        g = _gate(g, rate, bias, lower_bound, RAW)
        g = gl.where(inside, gl.where(g < STRONGEST, STRONGEST, g), 0.0)
        # What gates add up to from a block's beginning.
        sums = gl.associative_scan(g, 1, _add)
        whole = gl.sum(g, 1)  # (BLOCKS, K)
        f_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, K], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        f_s.store(whole)
        whole = gl.expand_dims(whole, 1)
        if NORM:
            norm_q = _inverse_norms(p_q, q_stride, num_tokens, eps, K, CHUNK, WARPS)
            norm_k = _inverse_norms(p_k, k_stride, num_tokens, eps, K, CHUNK, WARPS)
            b_q *= gl.convert_layout(gl.reshape(norm_q * query_scale, [BLOCKS, 8]), gl.SliceLayout(2, tile))[:, :, None]
            b_k *= gl.convert_layout(gl.reshape(norm_k, [BLOCKS, 8]), gl.SliceLayout(2, tile))[:, :, None]
        else:
            b_q *= query_scale

        k_s = gl.allocate_shared_memory(dtype, [3, CHUNK, K], shared)
        q_s = gl.allocate_shared_memory(dtype, [3, CHUNK, K], shared)
        o_m = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, mma_c))[:, None]
        o_n = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, mma_c))[None, :]
        apart = o_m ^ o_n
        if SAFE:
            # The middle of 16 tokens is where the second block begins.
            c_s = gl.allocate_shared_memory(dtype, [CHUNK, K], shared)
            since = sums - gl.where((o_b & 1) > 0, 0.0, whole)
            _fade(k_s.index(0), q_s.index(0), b_k, b_q, gl.exp2(since))
            c_s.store(gl.reshape((b_k * gl.exp2(-since)).to(dtype), [CHUNK, K]))
        else:
            pairs, scores = _multiply_faded(k_s.index(0), q_s.index(0), b_k, b_q, 1.0, mma_c)
            for level in gl.static_range(4):
                if level < 3:
                    # All sums up to a block's middle are those at the last token before it.
                    is_last = (o_i & ((2 << level) - 1)) == (1 << level) - 1
                    marked = gl.reshape(gl.where(is_last, sums, 0.0), [BLOCKS, 4 >> level, 2 << level, K])
                    middle = gl.expand_dims(gl.sum(marked, 2), 2)
                    since = gl.reshape(sums, [BLOCKS, 4 >> level, 2 << level, K]) - middle
                    since = gl.convert_layout(gl.reshape(since, [BLOCKS, 8, K]), tile)
                else:
                    since = sums - gl.where((o_b & 1) > 0, 0.0, whole)
                near = _multiply_faded(k_s.index(0), q_s.index(0), b_k, b_q, gl.exp2(-gl.abs(since)), mma_c)
                is_cut = apart >> level == 1
                pairs, scores = gl.where(is_cut, near[0], pairs), gl.where(is_cut, near[1], scores)
        barrier()
        # What gates add up to from the chunk's beginning until a block begins, until the middles before it, and in all.
        each = gl.expand_dims(f_s.load(gl.SliceLayout(0, pair)), 0)
        o_own = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, pair)))[:, None, None]
        o_other = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, pair)))[None, :, None]
        before = _add_blocks(each, o_other < o_own, tile)
        quarter = _add_blocks(each, o_other < o_own // 4 * 4 + 2, tile)
        middle = _add_blocks(each, o_other < o_own * 0 + 4, tile)
        last = _add_blocks(each, o_other < o_own * 0 + BLOCKS, tile)
        place = gl.program_id(0).to(gl.int64)
        o_x = o_t * K + o_k
        first_x = place * (CHUNK * K)
        left_over = gl.exp2(sums + before)
        gl.store(queries + first_x + o_x, (b_q * left_over).to(dtype))
        gl.store(keys + first_x + o_x, (-b_k * left_over).to(dtype))
        gl.store(rests + first_x + o_x, (b_k * gl.exp2(last - before - sums)).to(dtype))
        gl.store(total + place * K + o_k + o_b * 0, gl.exp2(last), mask=o_b + o_k * 0 == 0)
        _fade(k_s.index(1), q_s.index(1), b_k, b_q, gl.exp2(-gl.abs(sums + (before - quarter))))
        _fade(k_s.index(2), q_s.index(2), b_k, b_q, gl.exp2(-gl.abs(sums + (before - middle))))
        fence_async_shared()
        barrier()
        zero = gl.zeros([CHUNK, CHUNK], gl.float32, mma_c)
        k_t = k_s.index(1).permute((1, 0))
        pairs_1 = warpgroup_mma(k_s.index(1), k_t, zero, use_acc=False, is_async=True)
        scores_1 = warpgroup_mma(q_s.index(1), k_t, zero, use_acc=False, is_async=True)
        k_t = k_s.index(2).permute((1, 0))
        pairs_2 = warpgroup_mma(k_s.index(2), k_t, zero, use_acc=False, is_async=True)
        scores_2 = warpgroup_mma(q_s.index(2), k_t, zero, use_acc=False, is_async=True)
        if SAFE:
            k_t = c_s.permute((1, 0))
            pairs_0 = warpgroup_mma(k_s.index(0), k_t, zero, use_acc=False, is_async=True)
            scores_0 = warpgroup_mma(q_s.index(0), k_t, zero, use_acc=False, is_async=True)
            pairs, scores = warpgroup_mma_wait(0, deps=[pairs_0, scores_0])
        pairs_1, scores_1, pairs_2, scores_2 = warpgroup_mma_wait(0, deps=[pairs_1, scores_1, pairs_2, scores_2])
        pairs = gl.where(apart < 16, pairs, gl.where(apart < 32, pairs_1, pairs_2))
        scores = gl.where(apart < 16, scores, gl.where(apart < 32, scores_1, scores_2))
        o_pair = o_m * CHUNK + o_n
        seen = o_m >= o_n
        gl.store(all_scores + place * (CHUNK * CHUNK) + o_pair, gl.where(seen, scores, 0.0).to(dtype))
        p_pairs = transforms.to(gl.pointer_type(gl.float16)) + place * (CHUNK * CHUNK)
        gl.store(p_pairs + o_pair, pairs.to(gl.float16), mask=seen)


def fits_hopper(inputs: DeltaInputs) -> bool:
    """Return whether the kernels for Hopper run where the inputs are, with keys of their size."""
    return on_hopper(inputs.device) and inputs.heads.key_dim in KEYS


def launch_pairs(inputs: DeltaInputs, rows: Rows, chunks: tuple[Tensor, ...]) -> None:
    """Write the chunks' matrices but T to `chunks`, and A where T will be."""
    heads = inputs.heads
    scale, eps, a_stride, _ = inputs.numbers
    bound = inputs.lower_bound
    warps = heads.key_dim // 8
    pair_kernel[(chunks[0].shape[0] * heads.num_value_heads,)](
        inputs.tokens,
        inputs.gates,
        rows.control,
        chunks,
        rows.num_rows,
        scale,
        eps,
        a_stride,
        inputs.strides,
        bound,
        H=heads.num_key_heads,
        HV=heads.num_value_heads,
        K=heads.key_dim,
        CHUNK=CHUNK,
        RAW=inputs.A_log is None,
        NORM=inputs.normalize,
        SAFE=inputs.dtype == torch.bfloat16 and bound is not None and bound >= LOWEST_BOUND,
        WARPS=warps,
        num_warps=warps,
    )
