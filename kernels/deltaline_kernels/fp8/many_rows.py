"""Products of many tokens with FP8 weights: what a weight stands for is written out, and the library multiplies it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.checks import FP8_BLOCK
from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.device.state_tile import below
from deltaline_kernels.fp8.layout import BYTES, WORDS
from deltaline_kernels.fp8.plan import ManyRows
from deltaline_kernels.fp8.words import values_of

WORD, IN_WORDS = tl.constexpr(BYTES), tl.constexpr(WORDS)
# Outputs of a program, a divisor of a block.
OUTPUTS = 64


@triton.jit
def write_out_kernel(weight, scales, meant, N, K: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr):
    """Write OUTPUTS rows of one block of inputs to meant `[N, K]`: values times their scale, rounded."""
    COLUMNS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    i_out, column = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS
    o_n = i_out * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    o_w = tl.arange(0, IN_WORDS)[None, :]
    in_n = o_n < N
    words = tl.load(weight + o_n.to(tl.int64) * (COLUMNS * IN_WORDS) + column * IN_WORDS + o_w, mask=in_n, other=0)
    scale = tl.load(scales + i_out * OUTPUTS // BLOCK * COLUMNS + column)
    for j in tl.static_range(WORD):
        o_k = column * BLOCK + j * IN_WORDS + o_w
        value = values_of(words, j, tl.float16).to(tl.float32) * scale
        p_meant = meant + o_n.to(tl.int64) * K + o_k
        tl.store(p_meant, value.to(meant.dtype.element_ty), mask=in_n & below(o_k, K, BLOCK))


def multiply_many_rows(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor, plan: ManyRows) -> None:
    """Write out `[T, N]`; arguments are validated by `multiply_fp8`."""
    inputs, outputs = x.shape[1], len(weight)
    size = max(1, plan.values // inputs // FP8_BLOCK) * FP8_BLOCK
    memory = torch.empty(min(size, outputs), inputs, dtype=x.dtype, device=x.device)
    for begin in range(0, outputs, size):
        some = weight[begin : begin + size]
        meant = memory[: len(some)]
        grid = (cdiv(len(some), OUTPUTS) * cdiv(inputs, FP8_BLOCK),)
        sizes = {"K": inputs, "BLOCK": FP8_BLOCK, "OUTPUTS": OUTPUTS}
        write_out_kernel[grid](some, scales[begin // FP8_BLOCK :], meant, len(some), **sizes)
        torch.mm(x, meant.t(), out=out[:, begin : begin + size])
