"""How long the prefills of a bench are: a fixed number of tokens, or a distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

# The 99th percentile of the standard normal distribution.
_Z99 = 2.3263478740408408
_EXPECTED = "--prefill-tokens: expected N, LOW:HIGH or lognormal:MEDIAN,P99, each at least 1 and growing"


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: uniform in low .. high, or with the median `low` and the 99th percentile `high`."""

    low: int
    high: int
    is_lognormal: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "512", "16:4096" or "lognormal:512,4096". Raises ValueError."""
        name, _, sizes = text.rpartition("lognormal:")
        is_lognormal = name == "" and text != sizes
        low, mark, high = sizes.partition("," if is_lognormal else ":")
        try:
            made = cls(int(low), int(high) if mark else int(low), is_lognormal)
        except ValueError:
            raise ValueError(f"{_EXPECTED}, got {text!r}") from None
        if made.low < 1 or made.high < made.low or (is_lognormal and made.high == made.low):
            raise ValueError(f"{_EXPECTED}, got {text!r}")
        return made

    def draw(self, rng: np.random.Generator) -> int:
        """Return one length, at least 1."""
        if not self.is_lognormal:
            return int(rng.integers(self.low, self.high + 1))
        sigma = math.log(self.high / self.low) / _Z99
        return max(1, round(self.low * math.exp(sigma * rng.standard_normal())))

    def __str__(self) -> str:
        if self.is_lognormal:
            return f"lognormal:{self.low},{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"
