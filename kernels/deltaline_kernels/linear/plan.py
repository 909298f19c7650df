"""Which of cuBLASLt's algorithms multiplies few rows: the one that a measurement found fastest, else cuBLASLt's first.

A choice by a measurement at each start would differ from server to server, and with it the bits of what moves.
"""

from collections.abc import Sequence
from typing import NamedTuple

from deltaline_kernels.linear.fastest import FASTEST


class Offer(NamedTuple):
    """An algorithm that cuBLASLt has for a product. tile: its number among cublasLtMatmulTile_t. splits: of the inputs,
    whose sums are added by a launch of their own."""

    tile: int
    splits: int


def choose(num_rows: int, outputs: int, inputs: int, offers: Sequence[Offer]) -> int:
    """Return the place of the one that multiplies `[T, K]` by `[N, K]`, of at least one offer."""
    fastest = FASTEST.get((num_rows, outputs, inputs))
    return 0 if fastest is None or fastest not in offers else offers.index(Offer(*fastest))
