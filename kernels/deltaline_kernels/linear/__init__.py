"""Products of tokens with a weight: those of few tokens by a kernel of our own, others by torch."""

from typing import Any

from torch import Tensor
from torch.nn import functional

from deltaline_kernels.checks import ACTIVATIONS, check_tensor
from deltaline_kernels.linear.plan import plan_product
from deltaline_kernels.linear.reference import linear_reference
from deltaline_kernels.operators import operator

__all__ = ["linear", "linear_reference"]


def _fake_linear(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@operator(_fake_linear)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T`, `[T, N]` in x.dtype; products of fp32 without TF32 are what torch is told to make.

    How it is computed follows from the sizes alone: a row's bits do not depend on the others.

    Args:
        x: `[T, K]` fp32, bf16 or fp16, a row stride is fine.
        weight: `[N, K]` in x.dtype, contiguous, none of them 0.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    _check(x, weight)
    plan = plan_product(x)
    if plan is None:
        return _multiply_by_torch(x, weight)
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.linear.product import multiply

    return multiply(x, weight, plan)


def _multiply_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    # On a CPU it takes what lies between rows of 16 bits for part of them: NaN there would be everywhere.
    return functional.linear(x.contiguous() if x.device.type == "cpu" else x, weight)


def _check(x: Tensor, weight: Tensor) -> None:
    check_tensor("x", x, (None, None), ACTIVATIONS, None, row_stride=True)
    check_tensor("weight", weight, (None, x.shape[1]), (x.dtype,), x.device)
    if weight.numel() == 0:
        raise ValueError(f"weight: expected at least 1 row and 1 column, got shape {list(weight.shape)}")
