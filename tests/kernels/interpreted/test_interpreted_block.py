"""The tests of what blocks have around their products again, in Triton's interpreter."""

from __future__ import annotations

import numpy
from kernels.activation import test_silu_and_mul as activation
from kernels.activation.test_silu_and_mul import (
    test_a_token_does_not_depend_on_its_neighbours as test_an_activated_token_does_not_depend_on_its_neighbours,
)
from kernels.activation.test_silu_and_mul import (
    test_activation_is_rounded_as_models_round_it,
    test_activation_matches_the_reference,
)
from kernels.norm.test_hidden_norm import (
    test_a_scaled_sum_is_rounded_once,
    test_a_token_does_not_depend_on_its_neighbours,
    test_norm_matches_the_reference,
    test_norm_of_zeros_is_zero,
    test_sum_and_norm_match_the_reference,
    test_the_norm_is_that_of_the_rounded_sum,
    test_the_sum_has_the_bits_of_torchs,
)
from rigs.kernels.paths import InterpretedPath


def test_activation_is_right_far_from_zero(path: InterpretedPath) -> None:
    # Infinite exponentials are meant; NumPy warns of them.
    with numpy.errstate(over="ignore", invalid="ignore"):
        activation.test_activation_is_right_far_from_zero(path)
