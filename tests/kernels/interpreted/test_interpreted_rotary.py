"""The tests of rotate_and_store again, in Triton's interpreter."""

from __future__ import annotations

from kernels.rotary.test_rotary import (
    test_a_verify_is_overwritten_by_what_was_accepted,
    test_rotary_crosses_pages_of_any_size,
    test_rotary_finds_the_row_among_many,
    test_rotary_matches_the_reference,
    test_rotary_of_a_part_of_the_rows,
    test_rotary_of_any_size_matches_the_reference,
    test_rotary_repeats_bitwise_and_neighbours_do_not_matter,
    test_rotary_takes_rows_that_are_built_without_positions,
    test_rotary_without_norms,
)
