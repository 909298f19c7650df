"""Hidden states from the caller's arrays. Knows numpy, and torch only when the caller has already imported it.

Arrays come in as numpy (any float or integer type, bfloat16 of ml_dtypes too) or as torch tensors of any device; they
go out as numpy in the server's type, always.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]


def as_hidden(hidden: object, name: str, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Return hidden states as a C-contiguous numpy array [..., *shape] of the server's type; shape: of one token.

    The result may share memory with `hidden`; nothing is mutated. A value that the server's type can't hold becomes
    infinite, and the server refuses the row.

    Raises: TypeError for what is no array of numbers; ValueError for tokens of another shape. Both name `name`.
    """
    array = hidden if type(hidden) is np.ndarray else as_numpy(hidden, name)
    is_shaped = array.shape[-len(shape) :] == shape
    if is_shaped and array.dtype == dtype and array.flags.c_contiguous:
        return array  # what a fast caller brings
    if array.dtype.kind not in "fiu" and array.dtype != ml_dtypes.bfloat16:
        raise TypeError(f"{name}: expected an array of numbers, got elements of type {array.dtype}")
    if not is_shaped:
        expected = f"width {shape[0]}" if len(shape) == 1 else f"{shape[0]} streams of width {shape[1]}"
        layout = ", ".join(["...", *map(str, shape)])
        raise ValueError(f"{name}: expected hidden states of {expected}, [{layout}], got shape {array.shape}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype=dtype)


def as_numpy(hidden: object, name: str) -> Array:
    """Return the caller's array as numpy: of a torch tensor the CPU copy, with bfloat16 as that of ml_dtypes.

    Raises: TypeError, naming `name`, for what numpy takes for no array.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(hidden, torch.Tensor):
        try:
            return np.asarray(hidden)
        except (TypeError, ValueError, RuntimeError) as error:  # lists of unequal lengths, or of tensors
            raise TypeError(f"{name}: expected an array of numbers, got a {type(hidden).__name__}: {error}") from error
    tensor: Any = hidden.detach().to("cpu")
    try:
        if tensor.dtype == torch.bfloat16:
            bits: Array = tensor.contiguous().view(torch.int16).numpy()
            return bits.view(ml_dtypes.bfloat16)
        array: Array = tensor.numpy()
    except (TypeError, RuntimeError) as error:  # numpy has no such type, or the tensor is not dense
        expected = "a dense tensor of float64, float32, float16, bfloat16 or whole numbers"
        raise TypeError(f"{name}: expected {expected}, got one of {tensor.dtype}: {error}") from error
    return array
