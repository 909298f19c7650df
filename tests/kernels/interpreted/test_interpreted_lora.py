"""The tests of LoRA again: the Triton kernels in Triton's interpreter. Not in bf16, which it computes wrongly."""

from __future__ import annotations

import kernels.lora.test_lora as checks
import pytest
import torch
from kernels.lora.test_lora import (
    launches,
    make_dense,
    test_magnitudes_make_dora,
    test_outputs_have_a_dtype_of_their_own,
    test_programs_take_blocks_of_one_slice,
    test_programs_take_tiles_in_turns,
    test_repeat_is_equal,
    test_sums_between_the_products_are_fp32,
    test_tiles_may_be_those_of_any_rank,
    test_tokens_are_grouped_in_their_order,
    test_tokens_have_the_adapters_of_their_rows,
    test_weights_may_change_between_calls,
)
from kernels.lora.test_lora import test_a_token_that_is_not_finite_spoils_no_other as check_not_finite
from kernels.lora.test_lora import test_row_does_not_depend_on_its_neighbours as check_neighbours
from kernels.lora.test_lora_regressions import (
    test_a_rank_above_the_weights_counts_as_theirs,
    test_tokens_without_an_adapter_keep_their_bits,
    test_what_is_added_is_rounded_once,
)
from kernels.lora.test_lora_regressions import test_products_are_right_beyond_128_tokens as check_products
from rigs.kernels.paths import InterpretedPath


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", checks.CASES)
def test_lora_matches_the_reference(path: InterpretedPath, case: str) -> None:
    if path.dtype == torch.float16 and case in ("large-tiles", "dense-tiles", "many-slots", "long-inputs"):
        pytest.skip("how many tokens, slots and inputs there are is the same to fp32, which has these")
    checks.test_lora_matches_the_reference(path, case)


@pytest.mark.usefixtures("launches")
def test_row_does_not_depend_on_its_neighbours(path: InterpretedPath) -> None:
    """Fewer of them: a thousand tokens take the interpreter seconds."""
    check_neighbours(path, 20)


@pytest.mark.usefixtures("launches")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf], ids=str)
def test_a_token_that_is_not_finite_spoils_no_other(path: InterpretedPath, wrong: float) -> None:
    """NumPy warns of infinity times the zeros that pad a product."""
    check_not_finite(path, wrong)


def test_products_are_right_beyond_128_tokens(path: InterpretedPath) -> None:
    check_products(path, 130, 64, 130)


def test_dense_products_are_right_beyond_128_tokens(path: InterpretedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dense(monkeypatch, (path.dtype,))
    check_products(path, 260, 64, 130)
