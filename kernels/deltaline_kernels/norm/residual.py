"""RMS norm of hidden states in Triton, and of a residual that a branch is added to: one launch, a program per row."""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.sizes import pow2

# Channels of a row that a program holds at once; of a longer one it reads again what it added up.
MAX_BLOCK = 8192
# Of few rows each has more warps: what takes time then is a row's chain of loads, sums and stores.
FEW_ROWS = 264


@triton.jit
def _sum_up(x, residual, added, begin, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return BLOCK channels of what is normed, in fp32; with a residual, write what it became."""
    o_d = begin + tl.arange(0, BLOCK)
    total = tl.load(x + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    if residual is not None:
        total = tl.load(residual + o_d, mask=o_d < D, other=0.0).to(tl.float32) + scale * total
        total = total.to(added.dtype.element_ty)
        tl.store(added + o_d, total, mask=o_d < D)
        total = total.to(x.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def _scale_down(total, weight, y, begin, inverse, D: tl.constexpr, BLOCK: tl.constexpr):
    o_d = begin + tl.arange(0, BLOCK)
    scaled = total * inverse * tl.load(weight + o_d, mask=o_d < D, other=0.0)
    tl.store(y + o_d, scaled.to(y.dtype.element_ty), mask=o_d < D)


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    added,
    y,
    x_stride,
    residual_stride,
    eps,
    scale,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm a row. residual: None, or what x times `scale` is added to."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    y += row * D
    if residual is not None:
        residual += row * residual_stride
        added += row * D
    total = _sum_up(x, residual, added, 0, scale, D, BLOCK)
    squares = total * total
    for begin in range(BLOCK, D, BLOCK):
        more = _sum_up(x, residual, added, begin, scale, D, BLOCK)
        squares += more * more
    inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / D + eps)
    _scale_down(total, weight, y, 0, inverse, D, BLOCK)
    for begin in range(BLOCK, D, BLOCK):
        # Each thread reads what it wrote itself.
        o_d = begin + tl.arange(0, BLOCK)
        normed = x if residual is None else added
        more = tl.load(normed + o_d, mask=o_d < D, other=0.0).to(x.dtype.element_ty).to(tl.float32)
        _scale_down(more, weight, y, begin, inverse, D, BLOCK)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, y: Tensor) -> None:
    """Write the norm of each row of x to y. Arguments are validated by `rms_norm`."""
    _launch(x, None, weight, eps, 1.0, None, y)


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float, added: Tensor, y: Tensor
) -> None:
    """Write residual + scale * x to `added`, its norm to y. Arguments are validated by `add_rms_norm`."""
    _launch(x, residual, weight, eps, scale, added, y)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scale: float,
    added: Tensor | None,
    y: Tensor,
) -> None:
    num_tokens, channels = x.shape
    if num_tokens == 0:
        return
    block = min(MAX_BLOCK, pow2(channels))
    _rms_norm[(num_tokens,)](
        x,
        residual,
        weight,
        added,
        y,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        scale,
        D=channels,
        BLOCK=block,
        num_warps=max(1, min(8 if num_tokens <= FEW_ROWS else 4, block // 256)),
        num_stages=1,
    )
