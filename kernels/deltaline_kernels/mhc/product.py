"""The products of streams with the weights of their gates in Triton, the inputs split among programs.

    partials[split, token, column] = sum of x[token, k] weight[row of the column, k] over the inputs k of the split

Columns: comb, so that its rows are aligned, then pre and post, then the sum of the squares of x. fp32, without atomics:
who reads the partials adds them up in one order. bf16 streams meet weights as sums of bf16 terms, prepared ones, or
split from fp32 where they are used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.device.overlap import launch_options
from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.mhc.gates import NUM_TERMS, Mixing
from deltaline_kernels.mhc.plan import Plan


@triton.jit
def multiply(x, w, acc, TERMS: tl.constexpr):
    """Return acc + x w; x `[M, K]` of any dtype, w `[K, N]` fp32."""
    if x.dtype == tl.bfloat16:
        for i in tl.static_range(TERMS):
            term = w.to(tl.bfloat16)
            acc = tl.dot(x, term, acc)
            if i + 1 < TERMS:
                w -= term.to(tl.float32)
    elif x.dtype == tl.float16:
        # Its bits fit in one TF32, a weight's in two of three.
        acc = tl.dot(x.to(tl.float32), w, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def find_row(column, OUTS: tl.constexpr, COMB: tl.constexpr):
    """Return the weight's row of each column; comb's COMB rows are the last ones there."""
    return tl.where(column < COMB, column + (OUTS - COMB), column - COMB)


@triton.jit
def store_sums(partials, split, o_m, num_tokens, acc, squares, OUTS: tl.constexpr, PAD: tl.constexpr):
    """Store the sums of a split, the squares behind the others."""
    o_n = tl.arange(0, PAD)
    sums = tl.where((o_n == OUTS)[None, :], squares[:, None], acc)
    row = split.to(tl.int64) * num_tokens + o_m
    tl.store(partials + row[:, None] * PAD + o_n[None, :], sums, mask=(o_m < num_tokens)[:, None] & (o_n <= OUTS))


@triton.jit(do_not_specialize=["num_tokens"])
def product_kernel(
    residual,
    weight,
    partials,
    residual_stride,
    num_tokens,
    K: tl.constexpr,
    OUTS: tl.constexpr,
    COMB: tl.constexpr,
    PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    TERMS: tl.constexpr,
    OVERLAP: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Write the sums of products of some tokens over a part of the inputs."""
    if WAITS:
        gdc_wait()
    if OVERLAP:
        # The collapse may start, load streams and wait.
        gdc_launch_dependents()
    PREPARED: tl.constexpr = weight.dtype.element_ty == tl.bfloat16
    # Products of so many tokens are asynchronous ones, which read x from shared memory anew each: the first two of the
    # three terms are columns of one.
    ASYNC: tl.constexpr = PREPARED and BLOCK_M >= 64
    EVEN: tl.constexpr = SPLITS * STEPS * BLOCK_K == K
    split = tl.program_id(0) % SPLITS
    o_m = tl.program_id(0) // SPLITS * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, PAD)
    o_two = tl.arange(0, 2 * PAD)
    o_k = split * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    p_x = residual + o_m.to(tl.int64)[:, None] * residual_stride + o_k[None, :]
    p_two = weight + o_two[None, :] * K + o_k[:, None]
    if PREPARED:
        p_w = weight + o_n[None, :] * K + o_k[:, None]
    else:
        p_w = weight + find_row(o_n, OUTS, COMB)[None, :] * K + o_k[:, None]
    acc = tl.zeros((BLOCK_M, PAD), tl.float32)
    acc_two = tl.zeros((BLOCK_M, 2 * PAD), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for step in range(STEPS):
        in_k = step * BLOCK_K + o_k < K
        in_x, in_w, in_two = (o_m < num_tokens)[:, None], (o_n < OUTS)[None, :], (o_two % PAD < OUTS)[None, :]
        if not EVEN:
            in_x, in_w, in_two = in_x & in_k[None, :], in_w & in_k[:, None], in_two & in_k[:, None]
        x = tl.load(p_x + step * BLOCK_K, mask=in_x, other=0.0)
        if ASYNC:
            w = tl.load(p_w + 2 * PAD * K + step * BLOCK_K, mask=in_w, other=0.0)
            w_two = tl.load(p_two + step * BLOCK_K, mask=in_two, other=0.0)
            acc = tl.dot(x, w, acc)
            acc_two = tl.dot(x, w_two, acc_two)
            # Changes no bit, but is a reason to wait: products would still run when the next step begins, and Triton
            # 3.6 and 3.7 don't see that they read x when they have x's memory overwritten, as x is also read for its
            # squares.
            acc = acc.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)
            acc_two = acc_two.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)
        elif PREPARED:
            for i in tl.static_range(TERMS):
                # Columns without a weight are zeros there; reading them takes less than not to.
                if EVEN:
                    w = tl.load(p_w + i * PAD * K + step * BLOCK_K)
                else:
                    w = tl.load(p_w + i * PAD * K + step * BLOCK_K, mask=in_k[:, None], other=0.0)
                acc = tl.dot(x, w, acc)
        else:
            w = tl.load(p_w + step * BLOCK_K, mask=in_w, other=0.0)
            acc = multiply(x, w, acc, TERMS)
        exact = x.to(tl.float32)
        squares += exact * exact
    if ASYNC:
        acc += tl.sum(tl.reshape(acc_two, (BLOCK_M, 2, PAD)), 1)
    store_sums(partials, split, o_m, num_tokens, acc, tl.sum(squares, 1), OUTS, PAD)
    if OVERLAP:
        # Late: nothing here reads what the launch before wrote, but who waits for this one waits for both.
        gdc_wait()


def launch_product(
    residual: Tensor,
    mixing: Mixing,
    partials: Tensor,
    plan: Plan,
    *,
    overlap: bool,
    early: bool,
    waits: bool,
) -> None:
    """Write partials `[splits, N, columns]`.

    Of the weight `[rows, K]` the rows of comb are the last, unless it is a head's. `overlap`: the next launch may begin
    while this one runs, and waits by itself. `early`: so may this one, and `waits` if the launch before it writes its
    residual. Arguments are validated by the caller; there is a token.
    """
    num_tokens, streams, _ = residual.shape
    rows, inputs = mixing.weight.shape
    terms = mixing.terms if residual.dtype == torch.bfloat16 else None
    product_kernel[(cdiv(num_tokens, plan.block_m) * plan.splits,)](
        residual,
        mixing.weight if terms is None else terms,
        partials,
        residual.stride(0),
        num_tokens,
        K=inputs,
        OUTS=rows,
        COMB=streams * streams if rows > streams else 0,
        PAD=partials.shape[2],
        SPLITS=plan.splits,
        BLOCK_M=plan.block_m,
        BLOCK_K=plan.block_k,
        STEPS=plan.steps,
        TERMS=NUM_TERMS,
        OVERLAP=overlap,
        WAITS=early and waits,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(overlap=early),
    )
