"""Seeds of random histories."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int) -> list[Any]:
    """So many seeds: the first one runs always, the others are a sweep."""
    return [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, count))]
