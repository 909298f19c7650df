"""Tiles that a descriptor copies whole."""

from torch import Tensor


def is_aligned(x: Tensor) -> bool:
    """Return whether tiles of x can be copied whole: there are rows, and they begin at multiples of 16 bytes."""
    return x.shape[0] > 0 and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
