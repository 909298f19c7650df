"""The mistakes of engines again: the Triton kernels in Triton's interpreter. Not in bf16, which it computes wrongly."""

from __future__ import annotations

import pytest
from kernels.conv1d.test_conv1d_regressions import (
    test_a_block_outside_the_table_skips_the_row,
    test_a_line_too_narrow_for_the_drafts_is_refused,
    test_a_negative_zero_of_the_history_stays_one,
    test_a_new_sequence_reads_nothing_of_its_line,
    test_a_row_longer_than_promised_writes_no_other_line,
    test_a_short_chunk_leaves_the_shared_line_alone,
    test_an_accepted_count_above_the_line_reads_no_other_line,
    test_an_accepted_count_below_one_reads_no_other_line,
    test_an_empty_row_in_the_middle_changes_nothing,
    test_empty_rows_leave_their_lines_alone,
    test_line_0_is_ordinary_unless_it_is_said_to_be_null,
    test_more_than_four_drafts,
    test_no_drafts_after_an_accepted_step,
    test_no_tokens_still_fold_accepted_drafts_in,
    test_padding_never_writes_the_last_line,
    test_padding_of_a_graph_advances_no_state,
    test_rows_with_and_without_drafts_share_a_batch,
    test_the_line_slides_behind_any_accepted_draft,
    test_widths_above_four,
)
from kernels.conv1d.test_conv1d_regressions import (
    test_two_pieces_of_a_prefill_are_one as check_two_pieces,
)
from rigs.kernels.paths import InterpretedPath

__all__ = [
    "test_a_block_outside_the_table_skips_the_row",
    "test_a_line_too_narrow_for_the_drafts_is_refused",
    "test_a_negative_zero_of_the_history_stays_one",
    "test_a_new_sequence_reads_nothing_of_its_line",
    "test_a_row_longer_than_promised_writes_no_other_line",
    "test_a_short_chunk_leaves_the_shared_line_alone",
    "test_an_accepted_count_above_the_line_reads_no_other_line",
    "test_an_accepted_count_below_one_reads_no_other_line",
    "test_an_empty_row_in_the_middle_changes_nothing",
    "test_empty_rows_leave_their_lines_alone",
    "test_line_0_is_ordinary_unless_it_is_said_to_be_null",
    "test_more_than_four_drafts",
    "test_no_drafts_after_an_accepted_step",
    "test_no_tokens_still_fold_accepted_drafts_in",
    "test_padding_never_writes_the_last_line",
    "test_padding_of_a_graph_advances_no_state",
    "test_rows_with_and_without_drafts_share_a_batch",
    "test_the_line_slides_behind_any_accepted_draft",
    "test_widths_above_four",
]


@pytest.mark.parametrize("first", [2, 65])
def test_two_pieces_of_a_prefill_are_one(exact_path: InterpretedPath, first: int) -> None:
    """Fewer of them: a thousand tokens take the interpreter seconds."""
    check_two_pieces(exact_path, first)
