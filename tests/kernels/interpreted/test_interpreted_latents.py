"""The tests of attention over latents again, in Triton's interpreter."""

from __future__ import annotations

import kernels.attention.test_latents as checks
import pytest
import torch
from kernels.attention.test_latents import small_splits
from rigs.kernels.paths import InterpretedPath

__all__ = ["small_splits"]


@pytest.mark.parametrize("sizes", [pytest.param("576-512", marks=pytest.mark.sweep), "41-33", "200-130"])
def test_latents_are_keys_and_values(sizes: str, small_splits: None) -> None:
    checks.test_latents_are_keys_and_values(InterpretedPath("cpu", torch.float16), checks.SIZES[sizes], small_splits)


def test_latents_of_fp32_and_nothing_behind(small_splits: None) -> None:
    checks.test_latents_are_keys_and_values(InterpretedPath("cpu", torch.float32), (64, 64), small_splits)


def test_latents_have_more_heads_than_a_tile(small_splits: None) -> None:
    checks.test_latents_have_any_number_of_heads(InterpretedPath("cpu", torch.float16), 96, small_splits)
