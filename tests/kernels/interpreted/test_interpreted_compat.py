"""The tests of the engines' convolution again: the Triton kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from kernels.test_compat_conv1d import (
    test_a_row_without_an_index_has_the_line_of_its_number,
    test_fn_matches_the_reference,
    test_indices_may_be_int64,
    test_lines_may_be_a_column_of_a_table,
    test_offsets_behind_the_last_row_are_not_read,
    test_out_may_be_new_or_strided_or_x,
    test_update_matches_the_reference,
    test_update_of_ragged_rows_matches_the_reference,
)
from kernels.test_compat_conv1d import (
    test_x_is_rounded_to_the_dtype_of_the_states as check_rounding,
)

__all__ = [
    "test_a_row_without_an_index_has_the_line_of_its_number",
    "test_fn_matches_the_reference",
    "test_indices_may_be_int64",
    "test_lines_may_be_a_column_of_a_table",
    "test_offsets_behind_the_last_row_are_not_read",
    "test_out_may_be_new_or_strided_or_x",
    "test_update_matches_the_reference",
    "test_update_of_ragged_rows_matches_the_reference",
]


@pytest.mark.parametrize("wide_states", [True, False], ids=["wide-states", "narrow-states"])
def test_x_is_rounded_to_the_dtype_of_the_states(wide_states: bool) -> None:
    """Not to bf16: the interpreter cuts where it should round."""
    dtypes = (torch.float16, torch.float32) if wide_states else (torch.float32, torch.float16)
    check_rounding("cpu", *dtypes)
