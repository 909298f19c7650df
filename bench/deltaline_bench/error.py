"""How far a side's tensors are from the expected ones. Knows no limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Error:
    """The largest over the tensors compared: norm of the difference / norm expected, and largest absolute difference.

    Both are NaN where a compared tensor holds one.
    """

    relative: float
    largest: float


def compare(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Error:
    """Compare each actual tensor with the fp32 tensor expected under its name.

    Raises:
        ValueError: no tensor, an unknown name, or another shape.
    """
    if not actual:
        raise ValueError("actual: expected at least one tensor, got none")
    relative, largest = [], []
    for name, tensor in actual.items():
        if name not in expected:
            raise ValueError(f"actual: expected names among {sorted(expected)}, got {name!r}")
        wanted = expected[name]
        if tensor.shape != wanted.shape:
            raise ValueError(f"{name}: expected shape {list(wanted.shape)}, got {list(tensor.shape)}")
        difference = tensor.float() - wanted
        norm = float(wanted.norm())
        relative.append(float(difference.norm()) / norm if norm else float(difference.norm()))
        largest.append(float(difference.abs().max()) if difference.numel() else 0.0)
    return Error(_worst(relative), _worst(largest))


def _worst(values: list[float]) -> float:
    """Return the largest value, or NaN if there is one: max() alone may pass over it."""
    return next((value for value in values if value != value), max(values))
