"""Products with plain weights: by torch, but for few bf16 rows of shapes that a Hopper GPU multiplies faster."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, check_tensor
from deltaline_kernels.linear.fastest import FASTEST
from deltaline_kernels.linear.reference import linear_reference
from deltaline_kernels.operators import operator

# Bytes, of where tensors begin: cuBLASLt's algorithms rely on it unless told otherwise.
ALIGNMENT = 256

__all__ = ["linear", "linear_reference"]


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@operator(_fake)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T.

    By torch and its own settings, with one exception: on a Hopper GPU bf16 shapes that `linear/fastest.py` has, of
    tensors that begin at multiples of ALIGNMENT, are multiplied by cuBLASLt by the algorithm that is named there, sums
    in fp32, rounded once. A row's bits don't depend on the others of as many. Does not wait for the device.

    Args:
        x: `[T, K]` fp32, bf16 or fp16; a row stride is fine. T may be 0.
        weight: `[N, K]` in x.dtype, contiguous.

    Returns:
        `[T, N]` in x.dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_tensor("x", x, (None, None), ACTIVATIONS, None, row_stride=True)
    check_tensor("weight", weight, (None, x.shape[1]), (x.dtype,), x.device)
    if (x.shape[0], *weight.shape) in FASTEST and _may_choose(x, weight):
        from deltaline_kernels.linear.cublaslt import find_product  # which loads a library of CUDA's

        stride = x.shape[1] if x.shape[0] == 1 else x.stride(0)
        with torch.cuda.device(x.device):
            product = find_product(x.shape[0], weight.shape[0], x.shape[1], stride, x.device)
            if product is not None:
                return product.multiply(x, weight)
    return F.linear(x, weight)


def _may_choose(x: Tensor, weight: Tensor) -> bool:
    """Return whether operands are as those were that were measured."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    return x.data_ptr() % ALIGNMENT == weight.data_ptr() % ALIGNMENT == 0
