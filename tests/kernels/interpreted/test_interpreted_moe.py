"""The tests of routing and experts again: the Triton kernels in Triton's interpreter. Not in bf16, see test_lora."""

from __future__ import annotations

import kernels.moe.test_experts as checks
import numpy as np
import pytest
from kernels.moe.test_experts import (
    kernels,
    test_a_token_that_is_not_finite_spoils_no_other,
    test_a_token_without_experts_gets_zeros,
    test_choices_are_sorted_by_their_experts,
    test_experts_within_a_limit_match_the_reference,
    test_experts_without_gates_match_the_reference,
    test_integers_give_exact_products,
    test_many_tokens_are_computed_one_part_after_the_other,
    test_nan_stays_nan_without_gates,
    test_plan_of_a_batch_matches_the_reference,
    test_routes_and_experts_at_once_have_the_bits_of_one_after_the_other,
    test_the_same_expert_twice_counts_twice,
)
from kernels.moe.test_router import (
    test_a_token_that_is_not_finite_has_experts_and_spoils_no_other,
    test_bias_chooses_and_does_not_weigh,
    test_of_equal_scores_the_lowest_expert_is_first,
    test_routes_are_those_of_torch,
    test_routes_match_the_reference,
    test_sum_of_tiny_scores_is_not_zero,
    test_tokens_behind_the_rows_have_no_expert,
)
from rigs.kernels.expert_batches import Choose, anything, one, some
from rigs.kernels.paths import InterpretedPath


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("choose", [anything, one, some], ids=lambda choose: choose.__name__)
@pytest.mark.parametrize("case", ["one-token", "few-tokens", "odd-sizes", "several-tiles", "all-experts"])
def test_experts_match_the_reference(path: InterpretedPath, case: str, choose: Choose) -> None:
    checks.test_experts_match_the_reference(path, case, choose)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("case", "activation"), [("sorted", "silu"), ("odd-sizes", "relu2")])
def test_experts_in_fp8_match_the_reference(path: InterpretedPath, case: str, activation: str) -> None:
    checks.test_experts_in_fp8_match_the_reference(path, case, activation)


@pytest.mark.usefixtures("kernels")
def test_row_does_not_depend_on_its_neighbours(path: InterpretedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter's dots are BLAS's, whose sums depend on a row's place in the matrix on some processors.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype))
    checks.test_row_does_not_depend_on_its_neighbours(path)
