"""Products with weights that stay in FP8: each block of 128 by 128 values has a scale."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, FP8_BLOCK, check_tensor
from deltaline_kernels.fp8.cpu import multiply_fp8_cpu
from deltaline_kernels.fp8.layout import WORDS, pack_fp8
from deltaline_kernels.fp8.reference import multiply_fp8_reference
from deltaline_kernels.operators import operator

# Of a GPU, from which on Triton knows e4m3.
LEAST_CAPABILITY = (8, 9)

__all__ = ["can_multiply_fp8", "multiply_fp8", "multiply_fp8_reference", "pack_fp8"]


def can_multiply_fp8(device: torch.device) -> bool:
    """Whether weights, and experts, may be in FP8 on a device: the CPU, or a GPU of compute capability 8.9 or more."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def _fake(**_: Any) -> None:
    return None


@operator(_fake, mutates=["out"], results=0)
def multiply_fp8(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write x times a weight whose values stand for themselves times the scale of their block.

        out[t, n] = sum over k of x[t, k] scales[n // 128, k // 128] weight[n, k]

    x is multiplied as it is, with the weight's values, which 16 bits hold exactly; sums are fp32, and values or their
    sums meet their scale in fp32. Of many 16-bit tokens on a GPU (fp8/plan.py says from how many on), and of fp32
    tokens there, values times their scales are rounded to x.dtype, which must hold them, and torch.mm multiplies them,
    by its own settings. Does not wait for the device.

    Args:
        x: `[T, K]` fp32, bf16 or fp16, a row stride is fine. T may be 0.
        weight: `[N, K]` e4m3 (float8_e4m3fn) as `pack_fp8` lays it out: `[N, 32 * ceil(K / 128)]` int32, contiguous.
        scales: `[ceil(N / 128), ceil(K / 128)]` fp32, contiguous; those of a weight with one scale are all the same.
        out: `[T, N]` in x.dtype, a row stride is fine. Written. Must not overlap the others.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_tensor("x", x, (None, None), ACTIVATIONS, None, row_stride=True)
    device, (num_tokens, inputs) = x.device, x.shape
    blocks = -(-inputs // FP8_BLOCK)
    check_tensor("weight", weight, (None, blocks * WORDS), (torch.int32,), device)
    outputs = weight.shape[0]
    if inputs < 1 or outputs < 1:
        raise ValueError(f"weight: expected a packed [N, K], none of them 0, got {[outputs, inputs]}")
    check_tensor("scales", scales, (-(-outputs // FP8_BLOCK), blocks), (torch.float32,), device)
    check_tensor("out", out, (num_tokens, outputs), (x.dtype,), device, row_stride=True)
    if num_tokens == 0:
        return
    if device.type == "cpu":
        multiply_fp8_cpu(x, weight, scales, out)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.fp8.launch import multiply_fp8_triton

        multiply_fp8_triton(x, weight, scales, out)
