"""RMS norm of hidden states in Triton, alone or behind a residual's sum: a program has a token.

Behind a branch, whose last launch is a product, one may begin while that still runs: the weight is on its way when it
ends. Alone it may be the first of a graph, behind copies, which nothing begins beside.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.device.sizes import pow2

# Channels of a thread, two loads of 16 bytes of a 16-bit tensor, and most warps of a token.
THREAD_CHANNELS, MAX_WARPS = 16, 16


@triton.jit
def _normalize(value, weight, eps, D: tl.constexpr):
    """Return the norm of a token's fp32 channels, of which those behind D are 0."""
    return value * (1.0 / tl.sqrt(tl.sum(value * value, axis=0) / D + eps)) * weight


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit
def rms_norm_kernel(x, weight, y, x_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """Write the norm of a token."""
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    inside = o_d < D
    b_w = tl.load(weight + o_d, mask=inside, other=0.0)
    b_x = tl.load(x + token * x_stride + o_d, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * D + o_d, _normalize(b_x, b_w, eps, D).to(y.dtype.element_ty), mask=inside)


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    total,
    y,
    x_stride,
    residual_stride,
    eps,
    scale,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the sum of a token, and its norm."""
    token = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    inside = o_d < D
    if OVERLAP:
        gdc_launch_dependents()
    b_w = tl.load(weight + o_d, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    b_r = tl.load(residual + token * residual_stride + o_d, mask=inside, other=0.0).to(tl.float32)
    b_x = tl.load(x + token * x_stride + o_d, mask=inside, other=0.0).to(tl.float32)
    b_total = (b_r + scale * b_x).to(total.dtype.element_ty)
    tl.store(total + token * D + o_d, b_total, mask=inside)
    b_y = _normalize(b_total.to(y.dtype.element_ty).to(tl.float32), b_w, eps, D)
    tl.store(y + token * D + o_d, b_y.to(y.dtype.element_ty), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    """Write y `[T, D]`. Arguments are validated by `rms_norm`."""
    if y.numel() > 0:
        rms_norm_kernel[(len(x),)](x, weight, y, x.stride(0), eps, **_plan(x.shape[1]))


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float, total: Tensor, y: Tensor
) -> None:
    """Write total and y `[T, D]`. Arguments are validated by `add_rms_norm`."""
    if y.numel() == 0:
        return
    overlap = can_overlap(x)
    add_rms_norm_kernel[(len(x),)](
        x,
        residual,
        weight,
        total,
        y,
        x.stride(0),
        residual.stride(0),
        eps,
        scale,
        OVERLAP=overlap,
        **_plan(x.shape[1]),
        **launch_options(overlap=overlap),
    )


def _plan(num_channels: int) -> dict[str, int]:
    """Return the constants of a launch."""
    block = pow2(num_channels)
    warps = min(MAX_WARPS, max(1, block // (32 * THREAD_CHANNELS)))
    return {"D": num_channels, "BLOCK": block, "num_warps": warps, "num_stages": 1}
