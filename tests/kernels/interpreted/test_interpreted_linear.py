"""The tests of products of few tokens again: the Triton kernels in Triton's interpreter. Not in bf16, see test_lora."""

from __future__ import annotations

import kernels.linear.test_linear as checks
import numpy as np
import pytest
import torch
from kernels.linear.test_linear import test_products_match_the_reference
from rigs.kernels.paths import InterpretedPath


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter's dots are BLAS's, whose sums depend on a row's place in the matrix on some processors.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype))
    checks.test_a_row_does_not_depend_on_its_neighbours(InterpretedPath("cpu", torch.float16))
