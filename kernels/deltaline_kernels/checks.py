"""Argument validation used by the launchers.

Every failure is a TypeError or a ValueError that names the argument, what was expected and what was got.
"""

import sys
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
STATES = (torch.float32, torch.bfloat16, torch.float16)
# Weights whose blocks of so many rows and columns have a scale each.
FP8 = torch.float8_e4m3fn
FP8_BLOCK = 128
MAX_HEAD_DIM = 256
# Channels of a latent, and of what keys have behind it.
MAX_LATENT_DIM, MAX_BEHIND_LATENT = 512, 128
MIN_CONV_WIDTH, MAX_CONV_WIDTH = 2, 6
LARGEST = sys.float_info.max


def check_tensor(
    name: str,
    tensor: Tensor | None,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
    *,
    row_stride: bool = False,
    head_stride: bool = False,
) -> None:
    """Check one tensor argument.

    Args:
        shape: expected sizes, None for any.
        dtypes: accepted dtypes. device: None for any.
        row_stride: accept any stride of the first dimension; the others must be packed. Otherwise contiguous.
        head_stride: accept any strides of the first and the second of three dimensions that keep heads apart.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: device, shape or strides differ.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {_any_of(dtypes)}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    sizes = tensor.shape
    fits = len(sizes) == len(shape)
    if fits:
        for want, got in zip(shape, sizes, strict=True):
            fits &= want is None or want == got
    if not fits:
        raise ValueError(f"{name}: expected shape {_shape(shape)}, got {_shape(sizes)}")
    if tensor.is_contiguous():
        return
    strides = tensor.stride()
    if head_stride:
        _check_packed_heads(name, tensor)
    elif not row_stride:
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {strides}")
    else:
        packed = 1
        for size, stride in zip(sizes[:0:-1], strides[:0:-1], strict=True):
            if size > 1 and stride != packed:
                raise ValueError(f"{name}: expected packed rows, got strides {strides}")
            packed *= size
        if sizes[0] > 1 and strides[0] < packed:
            raise ValueError(f"{name}: expected a row stride of at least {packed}, got {strides[0]}")


def check_positive(name: str, value: int) -> None:
    """Raise TypeError or ValueError unless `value` is an integer of at least 1."""
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def check_no_gradient(name: str, value: object) -> None:
    """Raise ValueError if `value` is a tensor that needs a gradient, while gradients are recorded."""
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor that needs no gradient, as nothing is recorded for autograd; call under "
            "torch.no_grad() or torch.inference_mode(), or detach it"
        )


def parse_number(name: str, value: float) -> float:
    """Return a finite number of the host as a float: of an int 1 Triton would make a constant, of another an integer.

    Raises:
        TypeError, ValueError: another type, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):  # among which are NumPy's
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    number = value if isinstance(value, int) else float(value)  # of an int, which may be larger than any float
    if not -LARGEST <= number <= LARGEST:
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return float(number)


def parse_eps(name: str, value: float) -> float:
    """Return a finite number of at least 0 as a float; raise TypeError or ValueError for another."""
    value = parse_number(name, value)
    if value < 0:
        raise ValueError(f"{name}: expected at least 0, got {value}")
    return value


def _check_packed_heads(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last of three dimensions is packed and neither heads nor rows overlap."""
    num_rows, num_heads, dim = tensor.shape
    row_stride, head_stride, stride = tensor.stride()
    if dim > 1 and stride != 1:
        raise ValueError(f"{name}: expected packed heads, got strides {tensor.stride()}")
    if num_heads > 1 and head_stride < dim:
        raise ValueError(f"{name}: expected a head stride of at least {dim}, got {head_stride}")
    width = (num_heads - 1) * head_stride + dim
    if num_rows > 1 and row_stride < width:
        raise ValueError(f"{name}: expected a row stride of at least {width}, got {row_stride}")


def _any_of(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))


def _shape(sizes: Sequence[int | None]) -> str:
    return "[" + ", ".join("*" if size is None else str(size) for size in sizes) + "]"
