"""mhc_post in Triton: a program mixes some channels of all streams of one token. Reads and writes everything once."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.mhc.plan import plan_post


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit
def post_kernel(
    x,
    residual,
    post,
    comb,
    y,
    x_stride,
    residual_stride,
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the streams of a token behind a sublayer for a block of channels."""
    if OVERLAP:
        # The product of what is written here may start, and wait.
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_h = tl.program_id(0) % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = o_h < H
    p_r = residual + token * residual_stride + o_h
    streams = ()
    for j in tl.static_range(S):
        streams = streams + (tl.load(p_r + j * H, mask=inside, other=0.0).to(tl.float32),)
    b_x = tl.load(x + token * x_stride + o_h, mask=inside, other=0.0).to(tl.float32)
    p_comb = comb + token * (S * S)
    p_y = y + token * (S * H) + o_h
    for i in tl.static_range(S):
        b_y = tl.load(post + token * S + i) * b_x
        for j in tl.static_range(S):
            b_y += tl.load(p_comb + j * S + i) * streams[j]
        tl.store(p_y + i * H, b_y.to(y.dtype.element_ty), mask=inside)


def launch_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, y: Tensor, *, overlap: bool) -> None:
    """Write y `[N, S, H]`. `overlap`: the next launch may begin while this one runs, and waits by itself.

    Arguments are validated by the caller; there is a token.
    """
    num_tokens, streams, hidden = residual.shape
    block_h, warps = plan_post(num_tokens, hidden)
    post_kernel[(num_tokens * cdiv(hidden, block_h),)](
        x,
        residual,
        post,
        comb,
        y,
        x.stride(0),
        residual.stride(0),
        H=hidden,
        S=streams,
        BLOCK_H=block_h,
        OVERLAP=overlap,
        num_warps=warps,
    )
