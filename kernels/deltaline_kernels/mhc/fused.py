"""mhc_post and the products of its streams in one launch, in Triton, for few tokens: see post.py and product.py.

A program mixes some channels of all streams of 16 tokens, rounds and stores them, and multiplies what it has stored.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from deltaline_kernels.mhc.plan import FusedPlan, cdiv
from deltaline_kernels.mhc.product import find_row, multiply, store_sums


@triton.jit(do_not_specialize=["num_tokens"])
def _post_multiply(
    x,
    residual,
    post,
    comb,
    weight,
    y,
    partials,
    x_stride,
    residual_stride,
    num_tokens,
    H: tl.constexpr,
    S: tl.constexpr,
    PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STEPS: tl.constexpr,
    TERMS: tl.constexpr,
    DEPENDENTS: tl.constexpr,
):
    if DEPENDENTS:
        # The collapse may start and wait.
        gdc_launch_dependents()
    OUTS: tl.constexpr = S * (2 + S)
    i_split = tl.program_id(0) % SPLITS
    o_m = tl.program_id(0) // SPLITS * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, PAD)
    in_m = o_m < num_tokens
    in_n = (o_n < OUTS)[None, :]
    token = o_m.to(tl.int64)
    p_w = weight + find_row(o_n, OUTS, S * S)[None, :] * (S * H)
    acc = tl.zeros((BLOCK_M, PAD), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for step in range(STEPS):
        o_h = (i_split * STEPS + step) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = in_m[:, None] & (o_h < H)[None, :]
        streams = ()
        for j in tl.static_range(S):
            p_r = residual + token[:, None] * residual_stride + j * H + o_h[None, :]
            streams = streams + (tl.load(p_r, mask=inside, other=0.0).to(tl.float32),)
        b_x = tl.load(x + token[:, None] * x_stride + o_h[None, :], mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(S):
            w = tl.load(p_w + i * H + o_h[:, None], mask=in_n & (o_h < H)[:, None], other=0.0)
            b_y = tl.load(post + token * S + i, mask=in_m, other=0.0)[:, None] * b_x
            for j in tl.static_range(S):
                factor = tl.load(comb + token * (S * S) + j * S + i, mask=in_m, other=0.0)
                b_y += factor[:, None] * streams[j]
            rounded = b_y.to(y.dtype.element_ty)
            tl.store(y + token[:, None] * (S * H) + i * H + o_h[None, :], rounded, mask=inside)
            exact = rounded.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            acc = multiply(rounded, w, acc, TERMS)
    store_sums(partials, i_split, o_m, num_tokens, acc, squares, OUTS, PAD)


def launch_post_product(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    weight: Tensor,
    y: Tensor,
    partials: Tensor,
    plan: FusedPlan,
    *,
    dependents: bool,
) -> None:
    """Write y `[N, S, H]` and partials `[splits, N, columns]`. `dependents`: the next launch waits by itself.

    Arguments are validated by the caller; there is a token.
    """
    num_tokens, streams, hidden = residual.shape
    _post_multiply[(cdiv(num_tokens, plan.block_m) * plan.splits,)](
        x,
        residual,
        post,
        comb,
        weight,
        y,
        partials,
        x.stride(0),
        residual.stride(0),
        num_tokens,
        H=hidden,
        S=streams,
        PAD=partials.shape[2],
        SPLITS=plan.splits,
        BLOCK_M=plan.block_m,
        BLOCK_H=plan.block_h,
        STEPS=plan.steps,
        TERMS=plan.terms,
        DEPENDENTS=dependents,
        num_warps=plan.warps,
        # What is loaded ahead would be overwritten by nothing but costs shared memory that more programs may use.
        num_stages=1,
    )
