"""Whole numbers that callers give."""

from __future__ import annotations

from numbers import Integral
from typing import Any

UINT32_MAX = 2**32 - 1


def check_integer(name: str, number: Any, least: int, most: int | None = None) -> None:
    """Raise TypeError unless it is a whole number, ValueError unless it is in least .. most; None for no bound."""
    if not isinstance(number, Integral):
        raise TypeError(f"{name}: expected a whole number, got {number!r}")
    if int(number) < least or (most is not None and int(number) > most):
        expected = f"{least} or more" if most is None else f"{least} .. {most}"
        raise ValueError(f"{name}: expected {expected}, got {number}")
