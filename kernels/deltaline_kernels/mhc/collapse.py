"""Gates from sums of products, and the weighted sum of streams with its norm, in Triton.

The first programs compute post and comb, whose many normalisations nothing waits for, the others the weighted sums.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.mhc.plan import Plan, cdiv, pow2

# Splits that a program of gates adds up at once, so that it waits for all of them together; values of comb that it
# computes at most, and such values of all these splits.
SPLITS_AT_ONCE, COMB_VALUES, SPLIT_VALUES = 128, 128, 4096


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of fp32 x."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def load_sums(
    partials, o_t, column, inside, num_tokens, SPLITS: tl.constexpr, PAD: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Return the sums over splits of the columns of tokens; `o_t`, `column` and `inside` of three dimensions."""
    o_s = tl.arange(0, AT_ONCE)[:, None, None, None]
    p = partials + (o_s.to(tl.int64) * num_tokens + o_t[None]) * PAD + column[None]
    total = tl.zeros((AT_ONCE, inside.shape[0], inside.shape[1], inside.shape[2]), tl.float32)
    for s in range(0, SPLITS, AT_ONCE):
        total += tl.load(p + s * num_tokens.to(tl.int64) * PAD, mask=(s + o_s < SPLITS) & inside[None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def normalize(comb, in_i, in_j, EPS: tl.constexpr, REPEAT: tl.constexpr, S: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return comb `[T, j, i]` after softmax over i, then REPEAT normalisations over j with one over i between two."""
    if S != BLOCK_S:
        comb = tl.where(in_i, comb, float("-inf"))
    comb = tl.exp(comb - tl.max(comb, 2)[:, :, None])
    comb = comb / tl.sum(comb, 2)[:, :, None] + EPS
    if S != BLOCK_S:
        comb = tl.where(in_i & in_j, comb, 0.0)
    comb *= divide_one(tl.sum(comb, 1)[:, None, :] + EPS, in_i, S, BLOCK_S)
    for _ in range(REPEAT - 1):
        comb *= divide_one(tl.sum(comb, 2)[:, :, None] + EPS, in_j, S, BLOCK_S)
        comb *= divide_one(tl.sum(comb, 1)[:, None, :] + EPS, in_i, S, BLOCK_S)
    return comb


@triton.jit
def divide_one(total, inside, S: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return 1 / total; 1 behind the streams, where with an eps of 0 it would be infinite.

    As the square of the reciprocal root: 2 instructions where a division is 8, and normalisations follow each other.
    """
    if S != BLOCK_S:
        total = tl.where(inside, total, 1.0)
    root = tl.rsqrt(total)
    return root * root


@triton.jit
def write_gates(
    partials,
    scale,
    base,
    post,
    comb,
    o_t,
    num_tokens,
    K: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    RMS_EPS: tl.constexpr,
    SINKHORN_EPS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """Write post and comb of the tokens `o_t`."""
    OUTS: tl.constexpr = S * (2 + S)
    o_j = tl.arange(0, BLOCK_S)[None, :, None]
    o_i = tl.arange(0, BLOCK_S)[None, None, :]
    t = o_t[:, None, None]
    in_t, in_i, in_j = t < num_tokens, o_i < S, o_j < S
    inside = in_t & in_i & in_j
    behind = tl.full((1, 1, 1), OUTS, tl.int32)
    squares = load_sums(partials, t, behind, in_t, num_tokens, SPLITS, PAD, AT_ONCE)
    rms = tl.rsqrt(squares / K + RMS_EPS)
    mixes = load_sums(partials, t, o_j * S + o_i, inside, num_tokens, SPLITS, PAD, AT_ONCE)
    logits = mixes * rms * tl.load(scale + 2) + tl.load(base + 2 * S + o_j * S + o_i, mask=in_i & in_j, other=0.0)
    b_comb = normalize(logits, in_i, in_j, SINKHORN_EPS, REPEAT, S, BLOCK_S)
    tl.store(comb + t.to(tl.int64) * (S * S) + o_j * S + o_i, b_comb, mask=inside)
    in_post = in_t & in_i
    mixes = load_sums(partials, t, S * S + S + o_i, in_post, num_tokens, SPLITS, PAD, AT_ONCE)
    b_post = sigmoid(mixes * rms * tl.load(scale + 1) + tl.load(base + S + o_i, mask=in_i, other=0.0)) * MULTIPLIER
    tl.store(post + t.to(tl.int64) * S + o_i, b_post, mask=in_post)


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
    DEPENDENTS: tl.constexpr,
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
    if OVERLAP and not EARLY:
        gdc_wait()
    # Before what they are weighted with is known.
    b_r = tl.load(p_r, mask=inside, other=0.0)
    if OVERLAP and EARLY:
        gdc_wait()
    if DEPENDENTS:
        # Not before: whoever starts now may write partials that the launch before the last one read.
        gdc_launch_dependents()
    POW2_SPLITS: tl.constexpr = triton.next_power_of_2(SPLITS)
    o_s = tl.arange(0, POW2_SPLITS)
    in_s = o_s < SPLITS
    p_s = partials + (o_s.to(tl.int64) * num_tokens + token) * PAD
    squares = tl.sum(tl.load(p_s + OUTS, mask=in_s, other=0.0), 0)
    mixes = tl.load(p_s[:, None] + PRE + o_j[None, :], mask=in_s[:, None] & (o_j < S)[None, :], other=0.0)
    rms = tl.rsqrt(squares / (S * H) + RMS_EPS)
    b_base = tl.load(base + o_j, mask=o_j < S, other=0.0)
    pre = sigmoid(tl.sum(mixes, 0) * rms * tl.load(scale) + b_base) + PRE_EPS
    b_y = tl.sum(pre[:, None] * b_r.to(tl.float32), 0)
    if norm_weight is not None:
        mean = tl.sum(b_y * b_y, 0) / H
        b_y *= tl.rsqrt(mean + NORM_EPS) * tl.load(norm_weight + o_h, mask=o_h < H, other=0.0)
    tl.store(y + token * H + o_h, b_y.to(y.dtype.element_ty), mask=o_h < H)


@triton.jit(do_not_specialize=["num_tokens", "gate_programs"])
def _collapse(
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
    pid = tl.program_id(0)
    if pid < gate_programs:
        if OVERLAP:
            gdc_wait()
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
            False,
        )


def gate_sizes(streams: int, splits: int) -> dict[str, int]:
    """Return how many streams, tokens and splits a program of gates has, as constants of the kernel."""
    block_s, at_once = pow2(streams), min(SPLITS_AT_ONCE, pow2(splits))
    block_t = max(1, min(COMB_VALUES, SPLIT_VALUES // at_once) // (block_s * block_s))
    return {"BLOCK_S": block_s, "BLOCK_T": block_t, "AT_ONCE": at_once}


def launch_collapse(
    residual: Tensor,
    partials: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    y: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    plan: Plan,
    numbers: dict[str, float],
    *,
    early: bool,
    overlap: bool,
) -> None:
    """Write y `[N, H]`, and post `[N, S]` and comb `[N, S, S]` if they are given: without them it is a head.

    partials: `[splits, N, columns]`. numbers: the constants of Gates by their names in the kernel. `overlap`: may begin
    while the launch before it runs, which writes partials. `early`: that launch does not write the residual. Arguments
    are validated by the caller; there is a token.
    """
    num_tokens, streams, hidden = residual.shape
    sizes = gate_sizes(streams, partials.shape[0])
    gate_programs = 0 if gates is None else cdiv(num_tokens, sizes["BLOCK_T"])
    post, comb = (partials, partials) if gates is None else gates
    options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    _collapse[(gate_programs + num_tokens * cdiv(hidden, plan.block_h),)](
        residual,
        partials,
        scale,
        base,
        norm_weight,
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
        **numbers,
        **options,
    )
