"""Products with FP8 weights in Triton: a tile of tokens meets blocks of the weight, whose values become 16 bits, or 32,
where they are multiplied. A block's sum meets its scale, and joins the others in fp32.

A launch may begin while the one before it runs.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.checks import FP8_BLOCK
from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.fp8.plan import choose_plan

BLOCK = tl.constexpr(FP8_BLOCK)
# Tiles of tokens whose programs run one after the other for the same outputs: what they read of x stays in the L2.
GROUP = 8


@triton.jit
def _find_tile(num_tiles, PARTS: tl.constexpr, GROUP: tl.constexpr):
    """Return the tile of tokens and the part of the outputs of this program: of GROUP tiles, all parts of each."""
    program = tl.program_id(0)
    first = program // (GROUP * PARTS) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    place = program % (GROUP * PARTS)
    return first + place % size, place // size


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def fp8_kernel(
    x,
    weight,
    scales,
    out,
    x_stride,
    out_stride,
    num_tokens,
    num_tiles,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WAYS: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write BLOCK_N outputs of BLOCK_M tokens. WAYS, PART: blocks of inputs at a time, and inputs of each."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    COLUMNS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    STEPS: tl.constexpr = (K + WAYS * PART - 1) // (WAYS * PART)
    tile, part = _find_tile(num_tiles, (N + BLOCK_N - 1) // BLOCK_N, GROUP)
    o_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = o_m < num_tokens, below(o_n, N, BLOCK_N)
    p_x = x + o_m.to(tl.int64) * x_stride
    p_w = weight + o_n.to(tl.int64) * K
    # Outputs of a program are of one block.
    p_scales = scales + part * BLOCK_N // BLOCK * COLUMNS
    if WAYS == 1:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(0, STEPS):
            o_k = i * PART + tl.arange(0, PART)
            in_k = below(o_k, K, PART)
            b_x = tl.load(p_x[:, None] + o_k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
            b_w = tl.load(p_w[None, :] + o_k[:, None], mask=in_n[None, :] & in_k[:, None], other=0.0)
            scale = tl.load(p_scales + i * PART // BLOCK)
            total += tl.dot(b_x, b_w.to(b_x.dtype), input_precision="ieee") * scale
    else:
        sums = tl.zeros((WAYS, BLOCK_M, BLOCK_N), tl.float32)
        for i in range(0, STEPS):
            o_block = i * WAYS + tl.arange(0, WAYS)
            o_k = o_block[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
            in_k = below(o_k, K, WAYS * PART)
            b_x = tl.load(p_x[None, :, None] + o_k, mask=in_m[None, :, None] & in_k, other=0.0)
            b_w = tl.load(p_w[None, :, None] + o_k, mask=in_n[None, :, None] & in_k, other=0.0)
            scale = tl.load(p_scales + o_block, mask=below(o_block, COLUMNS, WAYS), other=0.0)
            made = tl.dot(b_x, tl.permute(b_w.to(b_x.dtype), (0, 2, 1)), input_precision="ieee")
            sums += made * scale[:, None, None]
        total = tl.sum(sums, axis=0)
    p_y = out + o_m.to(tl.int64)[:, None] * out_stride + o_n[None, :]
    tl.store(p_y, total.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def multiply_fp8_triton(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write out `[T, N]`; arguments are validated by `multiply_fp8`. T is at least 1."""
    num_tokens, (outputs, inputs) = x.shape[0], weight.shape
    plan = choose_plan(num_tokens, outputs, x.dtype)
    num_tiles, overlap = cdiv(num_tokens, plan.tokens), can_overlap(x)
    fp8_kernel[(num_tiles * cdiv(outputs, plan.outputs),)](
        x,
        weight,
        scales,
        out,
        x.stride(0),
        out.stride(0),
        num_tokens,
        num_tiles,
        K=inputs,
        N=outputs,
        BLOCK_M=plan.tokens,
        BLOCK_N=plan.outputs,
        WAYS=plan.ways,
        PART=plan.inputs,
        GROUP=GROUP,
        OVERLAP=overlap,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(overlap=overlap),
    )
