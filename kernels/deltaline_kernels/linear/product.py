"""Products of few tokens with a weight in Triton: a program reads its rows of the weight once, for all tokens.

What takes time is to read the weight. While the launch before still runs, the first of it are on their way to the L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.linear.plan import ProductPlan

# Bytes of each row of a program that are called for ahead.
AHEAD = tl.constexpr(512)


@triton.jit
def _call_for(rows):
    """Have AHEAD bytes at each of these pointers brought to the L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;",
        "=r,l",
        [rows.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# One compiled variant for all numbers of tokens of a plan: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def _multiply(
    x,
    w,
    y,
    num_tokens,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write BLOCK_N outputs of all tokens. OVERLAP: the launches before and behind."""
    if OVERLAP:
        gdc_launch_dependents()
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    in_m = (o_m < num_tokens)[:, None]
    in_n = below(o_n[None, :], N, BLOCK_N)
    p_row = w + tl.minimum(o_n, N - 1).to(tl.int64) * K
    p_w = w + o_n.to(tl.int64)[None, :] * K + o_k[:, None]
    if OVERLAP:
        if K * 2 >= AHEAD:
            _call_for(p_row)
        gdc_wait()
    p_x = x + o_m.to(tl.int64)[:, None] * x_stride + o_k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(0, STEPS):
        in_k = below(i * BLOCK_K + o_k, K, BLOCK_K)
        b_x = tl.load(p_x, mask=in_m & in_k[None, :], other=0.0)
        b_w = tl.load(p_w, mask=in_n & in_k[:, None], other=0.0)
        total = tl.dot(b_x, b_w, total)
        p_x += BLOCK_K
        p_w += BLOCK_K
    p_y = y + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    tl.store(p_y, total.to(y.dtype.element_ty), mask=in_m & (o_n < N)[None, :])


def multiply(x: Tensor, weight: Tensor, plan: ProductPlan) -> Tensor:
    """Return `[T, N]`. Arguments are validated by `linear`, which has chosen the plan."""
    (num_tokens, inputs), num_outputs = x.shape, len(weight)
    y, overlap = torch.empty(num_tokens, num_outputs, dtype=x.dtype, device=x.device), can_overlap(x)
    _multiply[(triton.cdiv(num_outputs, plan.block_n),)](
        x,
        weight,
        y,
        num_tokens,
        x.stride(0),
        N=num_outputs,
        K=inputs,
        OVERLAP=overlap,
        **plan.options(inputs),
        **launch_options(overlap=overlap),
    )
    return y
