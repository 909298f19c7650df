"""Gates behind a sublayer from sums of products, in Triton: post, and comb with its many normalisations."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.device.sizes import pow2

# Splits that a program of gates adds up at once, so that it waits for all of them together; values of comb that it
# computes at most, and such values of all these splits.
SPLITS_AT_ONCE, COMB_VALUES, SPLIT_VALUES = 128, 128, 4096


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of fp32 x."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def load_parts(
    partials, o_t, column, inside, num_tokens, SPLITS: tl.constexpr, PAD: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Return parts, one behind the other on a first dimension, whose sums are those of all splits of tokens' columns.

    `o_t`, `column` and `inside` have three dimensions.
    """
    o_s = tl.arange(0, AT_ONCE)[:, None, None, None]
    p = partials + (o_s.to(tl.int64) * num_tokens + o_t[None]) * PAD + column[None]
    parts = tl.zeros((AT_ONCE, inside.shape[0], inside.shape[1], inside.shape[2]), tl.float32)
    for s in range(0, SPLITS, AT_ONCE):
        parts += tl.load(p + s * num_tokens.to(tl.int64) * PAD, mask=(s + o_s < SPLITS) & inside[None], other=0.0)
    return parts


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
    OVERLAP: tl.constexpr,
):
    """Write post and comb of the tokens `o_t`. OVERLAP: the launch before, which writes partials, may still run."""
    OUTS: tl.constexpr = S * (2 + S)
    o_j = tl.arange(0, BLOCK_S)[None, :, None]
    o_i = tl.arange(0, BLOCK_S)[None, None, :]
    t = o_t[:, None, None]
    in_t, in_i, in_j = t < num_tokens, o_i < S, o_j < S
    inside, in_post = in_t & in_i & in_j, in_t & in_i
    behind = tl.full((1, 1, 1), OUTS, tl.int32)
    # Parameters, which none of these launches writes.
    post_scale, comb_scale = tl.load(scale + 1), tl.load(scale + 2)
    post_base = tl.load(base + S + o_i, mask=in_i, other=0.0)
    comb_base = tl.load(base + 2 * S + o_j * S + o_i, mask=in_i & in_j, other=0.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    # All on their way before the first is added up, which waits for other warps.
    squares = load_parts(partials, t, behind, in_t, num_tokens, SPLITS, PAD, AT_ONCE)
    post_parts = load_parts(partials, t, S * S + S + o_i, in_post, num_tokens, SPLITS, PAD, AT_ONCE)
    comb_parts = load_parts(partials, t, o_j * S + o_i, inside, num_tokens, SPLITS, PAD, AT_ONCE)
    rms = tl.rsqrt(tl.sum(squares, 0) / K + RMS_EPS)
    b_post = sigmoid(tl.sum(post_parts, 0) * rms * post_scale + post_base) * MULTIPLIER
    tl.store(post + t.to(tl.int64) * S + o_i, b_post, mask=in_post)
    logits = tl.sum(comb_parts, 0) * rms * comb_scale + comb_base
    b_comb = normalize(logits, in_i, in_j, SINKHORN_EPS, REPEAT, S, BLOCK_S)
    tl.store(comb + t.to(tl.int64) * (S * S) + o_j * S + o_i, b_comb, mask=inside)


def gate_sizes(streams: int, splits: int) -> dict[str, int]:
    """Return how many streams, tokens and splits a program of gates has, as constants of the kernel."""
    block_s, at_once = pow2(streams), min(SPLITS_AT_ONCE, pow2(splits))
    block_t = max(1, min(COMB_VALUES, SPLIT_VALUES // at_once) // (block_s * block_s))
    return {"BLOCK_S": block_s, "BLOCK_T": block_t, "AT_ONCE": at_once}
