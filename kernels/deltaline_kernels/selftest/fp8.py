"""What the self-test computes of products with weights that stay in FP8, in the sizes of the model's."""

from collections.abc import Iterator

import torch

from deltaline_kernels.checks import FP8, FP8_BLOCK
from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.fp8 import multiply_fp8, multiply_fp8_reference, pack_fp8
from deltaline_kernels.selftest.shapes import Compared, Fills

# Of every bucket on a GPU, which pads the last.
TOKENS, TOKENS_GPU = (3,), (1, 3, 20, 100, 200)


def compare_fp8(fills: Fills, outputs: int, inputs: int, dtype: torch.dtype) -> Iterator[Compared]:
    """Yield the name of each batch and kind of input, what was computed and what its reference computed: the first and
    the last block of outputs, whose values are the same rows and whose scales are their own."""
    last = (cdiv(outputs, FP8_BLOCK) - 1) * FP8_BLOCK
    for kind, fill in fills.items():
        device = fill(1).device
        rows = fill(FP8_BLOCK, inputs).to(FP8)
        weight = rows.view(torch.uint8).repeat(cdiv(outputs, FP8_BLOCK), 1)[:outputs].view(FP8)
        # Sums of about 1: those of ones are as large as their number.
        scales = (fill(cdiv(outputs, FP8_BLOCK), cdiv(inputs, FP8_BLOCK)).abs() + 0.5) * inputs ** (
            -1.0 if kind == "ones" else -0.5
        )
        words = pack_fp8(weight)
        for num_tokens in TOKENS if device.type == "cpu" else TOKENS_GPU:
            x = fill(num_tokens, inputs).to(dtype)
            out = torch.full((num_tokens, outputs), torch.nan, dtype=dtype, device=device)
            multiply_fp8(x, words, scales, out)
            wanted = [
                multiply_fp8_reference(x, weight[first : first + FP8_BLOCK], scales[first // FP8_BLOCK :][:1])
                for first in (0, last)
            ]
            got = [out[:, :FP8_BLOCK], out[:, last:]]
            yield f"fp8, {outputs} x {inputs}, {num_tokens} tokens, {kind}", got, wanted
