"""Which of cuBLASLt's algorithms multiplies few rows."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """An algorithm that cuBLASLt has for a product.

    tile: its number among cublasLtMatmulTile_t. splits: of the inputs, whose sums are added by a launch of their own.
    waves: how often the device is filled by its blocks.
    """

    tile: int
    splits: int
    waves: float


def choose(offers: Sequence[Offer]) -> int:
    """Return the place of the best one of at least one offer; the first is what cuBLAS would take by itself."""
    return 0
