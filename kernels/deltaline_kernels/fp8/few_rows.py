"""Products of few tokens with FP8 weights in Triton: words of the weight become 16-bit operands in registers.

The weight is the left operand, which may come from registers; a block's sum meets its scale and joins the others in
fp32. Parts of the inputs have programs of their own, which hide each other's waits, and a
second launch adds up their sums, always in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deltaline_kernels.checks import FP8_BLOCK
from deltaline_kernels.device.overlap import can_overlap, launch_options
from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.fp8.layout import BYTES, WORDS
from deltaline_kernels.fp8.plan import FewRows
from deltaline_kernels.fp8.words import values_of

WORD, IN_WORDS = tl.constexpr(BYTES), tl.constexpr(WORDS)
# Sums that a program of the second launch adds up.
ADDED = 512


# One compiled variant whatever tokens a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def few_rows_kernel(
    x,
    weight,
    scales,
    out,
    x_stride,
    out_stride,
    num_tokens,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write OUTPUTS outputs of TOKENS tokens; of several PARTS of the inputs, its part's sums: out `[PARTS, T, N]`."""
    COLUMNS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    OF_PART: tl.constexpr = (COLUMNS + PARTS - 1) // PARTS
    BLOCKS: tl.constexpr = (N + OUTPUTS - 1) // OUTPUTS
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    # Tiles of tokens run one after the other for the same outputs: the weight comes from afar once.
    i_part = tl.program_id(0) % PARTS
    i_out = tl.program_id(0) // PARTS % BLOCKS
    i_tile = tl.program_id(0) // (PARTS * BLOCKS)
    o_n = i_out * OUTPUTS + tl.arange(0, OUTPUTS)
    o_m = i_tile * TOKENS + tl.arange(0, TOKENS)
    o_w = tl.arange(0, IN_WORDS)
    in_n, in_m = below(o_n, N, OUTPUTS), o_m < num_tokens
    p_w = weight + o_n.to(tl.int64)[:, None] * (COLUMNS * IN_WORDS) + o_w[None, :]
    p_x = x + o_m.to(tl.int64)[:, None] * x_stride + o_w[None, :]
    # Outputs of a program are of one block.
    p_scales = scales + i_out * OUTPUTS // BLOCK * COLUMNS
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for i in range(i_part * OF_PART, tl.minimum((i_part + 1) * OF_PART, COLUMNS)):
        words = tl.load(p_w + i * IN_WORDS, mask=in_n[:, None], other=0)
        scale = tl.load(p_scales + i)
        made = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for j in tl.static_range(WORD):
            first = i * BLOCK + j * IN_WORDS
            in_x = in_m[:, None] & below(first + o_w, K, BLOCK)[None, :]
            b_x = tl.load(p_x + first, mask=in_x, other=0.0)
            made = tl.dot(values_of(words, j, x.dtype.element_ty), tl.trans(b_x), acc=made)
        total += made * scale
    p_out = out + (i_part * num_tokens + o_m.to(tl.int64))[None, :] * out_stride + o_n[:, None]
    tl.store(p_out, total.to(out.dtype.element_ty), mask=in_n[:, None] & in_m[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def add_parts_kernel(
    sums, out, out_stride, num_tokens, N: tl.constexpr, PARTS: tl.constexpr, ADDED: tl.constexpr, OVERLAP: tl.constexpr
):
    """Write ADDED outputs of a token: what its PARTS left, in fp32, `[PARTS, T, N]`."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (N + ADDED - 1) // ADDED
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    o_n = tl.program_id(0) % BLOCKS * ADDED + tl.arange(0, ADDED)
    in_n = below(o_n, N, ADDED)
    total = tl.zeros((ADDED,), tl.float32)
    for i in tl.static_range(PARTS):
        total += tl.load(sums + (i * num_tokens + token) * N + o_n, mask=in_n, other=0.0)
    tl.store(out + token * out_stride + o_n, total.to(out.dtype.element_ty), mask=in_n)


def multiply_few_rows(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor, plan: FewRows) -> None:
    """Write out `[T, N]` of 16-bit tokens; arguments are validated by `multiply_fp8`."""
    (num_tokens, inputs), outputs = x.shape, len(weight)
    parts, overlap = min(plan.parts, cdiv(inputs, FP8_BLOCK)), can_overlap(x)
    sums = out
    if parts > 1:
        sums = torch.empty(parts * num_tokens, outputs, dtype=torch.float32, device=x.device)
    few_rows_kernel[(parts * cdiv(outputs, plan.outputs) * cdiv(num_tokens, plan.tokens),)](
        x,
        weight,
        scales,
        sums,
        x.stride(0),
        sums.stride(0),
        num_tokens,
        K=inputs,
        N=outputs,
        BLOCK=FP8_BLOCK,
        TOKENS=plan.tokens,
        OUTPUTS=plan.outputs,
        PARTS=parts,
        OVERLAP=overlap,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(overlap=overlap),
    )
    if parts > 1:
        add_parts_kernel[(num_tokens * cdiv(outputs, ADDED),)](
            sums,
            out,
            out.stride(0),
            num_tokens,
            N=outputs,
            PARTS=parts,
            ADDED=ADDED,
            OVERLAP=overlap,
            num_warps=4,
            **launch_options(overlap=overlap),
        )
