"""The tests of products with FP8 weights again: the kernel in Triton's interpreter. Not in bf16, see test_lora."""

from __future__ import annotations

import kernels.fp8.test_multiply_fp8 as checks
import pytest
from kernels.fp8.test_multiply_fp8 import (
    kernels,
    test_a_row_does_not_depend_on_its_neighbours,
    test_every_value_stands_for_itself,
    test_integers_give_exact_products,
    test_no_tokens,
)
from rigs.kernels.paths import InterpretedPath


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", ["more-blocks-than-ways", "odd", "several-tiles"])
def test_products_match_the_reference(path: InterpretedPath, case: str) -> None:
    checks.test_products_match_the_reference(path, case)
