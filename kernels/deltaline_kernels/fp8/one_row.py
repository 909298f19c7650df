"""The product of one token with an FP8 weight in Triton: no tensor cores, as reading the weight takes longer.

A program's threads each sum up inputs of their own, in fp32, and add up their sums at the end. A launch may begin while
the one before it runs.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.checks import FP8, FP8_BLOCK
from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.fp8.layout import BYTES, WORDS
from deltaline_kernels.fp8.plan import OneRow

WORD, IN_WORDS = tl.constexpr(BYTES), tl.constexpr(WORDS)


@triton.jit
def one_row_kernel(
    x,
    weight,
    scales,
    out,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write OUTPUTS outputs. weight: bytes in the order of layout.py; BLOCKS: blocks of inputs at a time."""
    COLUMNS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    AT_ONCE: tl.constexpr = BLOCKS * BLOCK
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    o_n = part * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    o_b = tl.arange(0, AT_ONCE)
    # The input whose values are byte o_b of a row.
    o_k = o_b // BLOCK * BLOCK + o_b % WORD * IN_WORDS + o_b % BLOCK // WORD
    in_n = below(o_n, N, OUTPUTS)
    p_w = weight + o_n.to(tl.int64) * (COLUMNS * BLOCK) + o_b[None, :]
    # Outputs of a program are of one block.
    p_scales = scales + part * OUTPUTS // BLOCK * COLUMNS
    sums = tl.zeros((OUTPUTS, AT_ONCE), tl.float32)
    for i in range(0, COLUMNS * BLOCK, AT_ONCE):
        b_w = tl.load(p_w + i, mask=in_n & below(i + o_b, COLUMNS * BLOCK, AT_ONCE)[None, :], other=0.0)
        b_x = tl.load(x + i + o_k, mask=below(i + o_k, K, AT_ONCE), other=0.0).to(tl.float32)
        b_x *= tl.load(p_scales + (i + o_b) // BLOCK, mask=below(i + o_b, COLUMNS * BLOCK, AT_ONCE), other=0.0)
        sums += b_w.to(tl.float32) * b_x[None, :]
    total = tl.sum(sums, axis=1)[:, None]
    tl.store(out + o_n, total.to(out.dtype.element_ty), mask=in_n)


def multiply_one_row(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor, plan: OneRow) -> None:
    """Write out `[1, N]`; arguments are validated by `multiply_fp8`."""
    outputs, overlap = len(weight), can_overlap(x)
    one_row_kernel[(cdiv(outputs, plan.outputs),)](
        x,
        weight.view(FP8),
        scales,
        out,
        K=x.shape[1],
        N=outputs,
        BLOCK=FP8_BLOCK,
        OUTPUTS=plan.outputs,
        BLOCKS=plan.blocks,
        OVERLAP=overlap,
        num_warps=plan.warps,
        **launch_options(overlap=overlap),
    )
