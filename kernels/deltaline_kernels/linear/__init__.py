"""Products with plain weights: of few 16-bit rows on a Hopper GPU by an algorithm of our choice, else by torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, check_tensor
from deltaline_kernels.linear.reference import linear_reference
from deltaline_kernels.operators import operator

# Rows of the batches that servers capture graphs of, of which each has an algorithm of its own.
FEW_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Bytes, of where tensors begin: cuBLASLt's algorithms rely on it unless told otherwise.
ALIGNMENT = 256

__all__ = ["linear", "linear_reference"]


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@operator(_fake)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T.

    So many rows as FEW_ROWS has, of 16 bits, are multiplied on a Hopper GPU by cuBLASLt, sums in fp32, rounded once:
    by that of its algorithms which `plan.choose` prefers, the same one on every machine with the same library. A row's
    bits depend on how many rows there are, not on the others. Everything else is torch's, by its own settings. Does not
    wait for the device.

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
    if _has_choice(x, weight):
        from deltaline_kernels.linear.cublaslt import find_product  # which loads a library of CUDA's

        stride = max(x.stride(0), x.shape[1])  # that of one row says nothing
        product = find_product(x.shape[0], weight.shape[0], x.shape[1], stride, x.dtype, x.device)
        if product is not None:
            return product.multiply(x, weight)
    return F.linear(x, weight)


def _has_choice(x: Tensor, weight: Tensor) -> bool:
    """Return whether plans know a product."""
    if x.device.type == "cpu" or x.shape[0] not in FEW_ROWS or x.dtype == torch.float32 or 0 in weight.shape:
        return False
    is_aligned = x.data_ptr() % ALIGNMENT == weight.data_ptr() % ALIGNMENT == 0
    return is_aligned and torch.cuda.get_device_capability(x.device)[0] == 9
