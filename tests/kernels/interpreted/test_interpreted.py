"""The tests of the kernels again, with the paths of this folder: the Triton kernels in Triton's interpreter."""

from __future__ import annotations

import numpy
import torch
from kernels.paths import InterpretedPath
from kernels.test_activation import check_far_silu, check_silu
from kernels.test_conv1d import (
    test_conv_has_any_number_of_channels,
    test_conv_has_every_width,
    test_conv_matches_the_reference,
    test_conv_records_no_gradients,
    test_conv_replays_any_accepted_count,
    test_conv_row_does_not_depend_on_its_neighbours,
    test_conv_splits_its_output,
    test_conv_splits_without_a_seam,
    test_conv_verifies_many_tokens,
)
from kernels.test_gated_delta import (
    test_delta_in_chunks_is_delta_token_by_token,
    test_delta_is_right_for_correlated_keys,
    test_delta_matches_the_reference,
    test_delta_of_many_heads_matches_the_reference,
    test_delta_replays_any_accepted_count,
    test_delta_rounds_a_16_bit_state_once,
    test_delta_row_does_not_depend_on_its_neighbours,
    test_delta_splits_without_a_seam,
    test_delta_survives_the_strongest_gates,
)
from kernels.test_norm import test_norm_matches_the_reference, test_norm_of_zeros_is_zero

__all__ = [
    "test_conv_has_any_number_of_channels",
    "test_conv_has_every_width",
    "test_conv_matches_the_reference",
    "test_conv_records_no_gradients",
    "test_conv_replays_any_accepted_count",
    "test_conv_row_does_not_depend_on_its_neighbours",
    "test_conv_splits_its_output",
    "test_conv_splits_without_a_seam",
    "test_conv_verifies_many_tokens",
    "test_delta_in_chunks_is_delta_token_by_token",
    "test_delta_is_right_for_correlated_keys",
    "test_delta_matches_the_reference",
    "test_delta_of_many_heads_matches_the_reference",
    "test_delta_replays_any_accepted_count",
    "test_delta_rounds_a_16_bit_state_once",
    "test_delta_row_does_not_depend_on_its_neighbours",
    "test_delta_splits_without_a_seam",
    "test_delta_survives_the_strongest_gates",
    "test_norm_matches_the_reference",
    "test_norm_of_zeros_is_zero",
]


def test_silu_is_right_to_the_last_place_in_fp16() -> None:
    """Only in fp16: the interpreter rounds the product of a fused multiplication and addition."""
    check_silu(InterpretedPath("cpu", torch.float16))


def test_silu_is_right_far_from_zero(path: InterpretedPath) -> None:
    # Infinite exponentials are meant; NumPy warns of them.
    with numpy.errstate(over="ignore", invalid="ignore"):
        check_far_silu(path)
