"""Products with FP8 weights on the CPU: some rows of the weight at a time are what they stand for, in fp32."""

import torch
from torch import Tensor

from deltaline_kernels.checks import FP8_BLOCK
from deltaline_kernels.cpu.scaled import dequantised
from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.fp8.layout import unpack_fp8

# Tokens of a product, always: of fewer, sums would be made in another order.
TOKENS = 16
# Rows of a weight that are fp32 at a time.
ROWS = 512


def multiply_fp8_cpu(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write out `[T, N]`; arguments are validated by `multiply_fp8`."""
    num_tokens, inputs = x.shape
    tokens = torch.zeros(cdiv(num_tokens, TOKENS) * TOKENS, inputs, dtype=torch.float32)
    tokens[:num_tokens] = x
    for begin in range(0, len(weight), ROWS):
        some = slice(begin, begin + ROWS)
        meant = dequantised(unpack_fp8(weight[some], inputs), scales[begin // FP8_BLOCK :]).t()
        for first in range(0, num_tokens, TOKENS):
            made = torch.mm(tokens[first : first + TOKENS], meant)
            out[first : first + TOKENS, some] = made[: num_tokens - first]
