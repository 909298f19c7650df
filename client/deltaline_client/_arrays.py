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


def as_hidden(hidden: object, name: str, hidden_size: int, dtype: np.dtype[Any]) -> Array:
    """Return hidden states as a C-contiguous numpy array [..., hidden_size] of the server's type.

    The result may share memory with `hidden`; nothing is mutated. A value that the server's type can't hold becomes
    infinite, and the server refuses the row.

    Raises: TypeError for what is no array of numbers; ValueError for another width. Both name `name`.
    """
    array = hidden if type(hidden) is np.ndarray else as_numpy(hidden)
    if array.dtype == dtype and array.ndim and array.shape[-1] == hidden_size and array.flags.c_contiguous:
        return array  # what a fast caller brings
    if array.dtype.kind not in "fiu" and array.dtype != ml_dtypes.bfloat16:
        raise TypeError(f"{name}: expected an array of numbers, got elements of type {array.dtype}")
    if array.ndim == 0 or array.shape[-1] != hidden_size:
        raise ValueError(f"{name}: expected hidden states of width {hidden_size}, got shape {array.shape}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype=dtype)


def as_numpy(hidden: object) -> Array:
    """Return the caller's array as numpy: of a torch tensor the CPU copy, with bfloat16 as that of ml_dtypes."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(hidden, torch.Tensor):
        return np.asarray(hidden)
    tensor: Any = hidden.detach().to("cpu")
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array
