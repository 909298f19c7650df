"""Gates from sums of products, and the weighted sum of streams with its norm, in Triton.

The first programs compute post and comb, whose many normalisations nothing waits for, the others the weighted sums.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.device.overlap import launch_options
from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.mhc.gates import Mixing
from deltaline_kernels.mhc.plan import Plan
from deltaline_kernels.mhc.sinkhorn import gate_sizes, sigmoid, write_gates


@triton.jit
def collapse_streams(
    pid,
    residual,
    partials,
    scale,
    base,
    norm_weight,
    y,
    residual_stride,
    num_tokens,
    H: tl.constexpr,
    S: tl.constexpr,
    HEAD: tl.constexpr,
    PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RMS_EPS: tl.constexpr,
    PRE_EPS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write some channels of the weighted sum of one token's streams: the work of one program."""
    PRE: tl.constexpr = 0 if HEAD else S * S
    OUTS: tl.constexpr = S if HEAD else S * (2 + S)
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = (pid // BLOCKS).to(tl.int64)
    o_h = pid % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    o_j = tl.arange(0, BLOCK_S)
    inside = (o_j < S)[:, None] & (o_h < H)[None, :]
    p_r = residual + token * residual_stride + o_j[:, None] * H + o_h[None, :]
    # Parameters, which none of these launches writes.
    b_scale = tl.load(scale)
    b_base = tl.load(base + o_j, mask=o_j < S, other=0.0)
    if OVERLAP and not EARLY:
        gdc_wait()
    # Before what they are weighted with is known. They are read again behind the sublayer only: they need not take the
    # place of what the product left of others in the L2.
    b_r = tl.load(p_r, mask=inside, other=0.0, eviction_policy="evict_first")
    if OVERLAP and EARLY:
        gdc_wait()
    if OVERLAP:
        # Not before: whoever starts now may write partials that the launch before the last one read.
        gdc_launch_dependents()
    POW2_SPLITS: tl.constexpr = triton.next_power_of_2(SPLITS)
    o_s = tl.arange(0, POW2_SPLITS)
    in_s = o_s < SPLITS
    p_s = partials + (o_s.to(tl.int64) * num_tokens + token) * PAD
    # Both on their way before one is added up, which waits for other warps.
    squares = tl.load(p_s + OUTS, mask=in_s, other=0.0)
    mixes = tl.load(p_s[:, None] + PRE + o_j[None, :], mask=in_s[:, None] & (o_j < S)[None, :], other=0.0)
    rms = tl.rsqrt(tl.sum(squares, 0) / (S * H) + RMS_EPS)
    pre = sigmoid(tl.sum(mixes, 0) * rms * b_scale + b_base) + PRE_EPS
    b_y = tl.sum(pre[:, None] * b_r.to(tl.float32), 0)
    if norm_weight is not None:
        mean = tl.sum(b_y * b_y, 0) / H
        b_y *= tl.rsqrt(mean + NORM_EPS) * tl.load(norm_weight + o_h, mask=o_h < H, other=0.0)
    tl.store(y + token * H + o_h, b_y.to(y.dtype.element_ty), mask=o_h < H)


@triton.jit(do_not_specialize=["num_tokens", "gate_programs"])
def collapse_kernel(
    residual,
    partials,
    scale,
    base,
    norm_weight,
    y,
    post,
    comb,
    residual_stride,
    num_tokens,
    gate_programs,
    H: tl.constexpr,
    S: tl.constexpr,
    HEAD: tl.constexpr,
    PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AT_ONCE: tl.constexpr,
    RMS_EPS: tl.constexpr,
    PRE_EPS: tl.constexpr,
    SINKHORN_EPS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    REPEAT: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the gates of some tokens, or the weighted sum of a token's streams."""
    pid = tl.program_id(0)
    if pid < gate_programs:
        if not HEAD:
            write_gates(
                partials,
                scale,
                base,
                post,
                comb,
                pid * BLOCK_T + tl.arange(0, BLOCK_T),
                num_tokens,
                S * H,
                S,
                BLOCK_S,
                PAD,
                SPLITS,
                AT_ONCE,
                RMS_EPS,
                SINKHORN_EPS,
                MULTIPLIER,
                REPEAT,
                OVERLAP,
            )
    else:
        collapse_streams(
            pid - gate_programs,
            residual,
            partials,
            scale,
            base,
            norm_weight,
            y,
            residual_stride,
            num_tokens,
            H,
            S,
            HEAD,
            PAD,
            SPLITS,
            BLOCK_S,
            BLOCK_H,
            RMS_EPS,
            PRE_EPS,
            NORM_EPS,
            EARLY,
            OVERLAP,
        )


def launch_collapse(
    residual: Tensor,
    partials: Tensor,
    mixing: Mixing,
    y: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    plan: Plan,
    *,
    early: bool,
    overlap: bool,
) -> None:
    """Write y `[N, H]`, and post `[N, S]` and comb `[N, S, S]` if they are given: without them it is a head.

    partials: `[splits, N, columns]`. `overlap`: may begin while the launch before it runs, which writes partials.
    `early`: that launch does not write the residual. Arguments are validated by the caller; there is a token.
    """
    num_tokens, streams, hidden = residual.shape
    sizes = gate_sizes(streams, partials.shape[0])
    gate_programs = 0 if gates is None else cdiv(num_tokens, sizes["BLOCK_T"])
    post, comb = (partials, partials) if gates is None else gates
    collapse_kernel[(gate_programs + num_tokens * cdiv(hidden, plan.block_h),)](
        residual,
        partials,
        mixing.scale,
        mixing.base,
        mixing.norm_weight,
        y,
        post,
        comb,
        residual.stride(0),
        num_tokens,
        gate_programs,
        H=hidden,
        S=streams,
        HEAD=gates is None,
        PAD=partials.shape[2],
        SPLITS=partials.shape[0],
        BLOCK_H=plan.block_h,
        EARLY=early,
        OVERLAP=overlap,
        num_warps=plan.collapse_warps,
        num_stages=1,
        **sizes,
        **mixing.numbers,
        **launch_options(overlap=overlap),
    )
