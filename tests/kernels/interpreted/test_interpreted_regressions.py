"""The mistakes of engines again: the Triton kernels in Triton's interpreter. Not in bf16, which it computes wrongly."""

from __future__ import annotations

from kernels.conv1d.test_conv1d_regressions import (
    test_a_block_outside_the_table_skips_the_row,
    test_a_line_too_narrow_for_the_drafts_is_refused,
    test_a_negative_zero_of_the_history_stays_one,
    test_a_row_longer_than_promised_writes_no_other_line,
    test_an_accepted_count_outside_the_line_reads_no_other_line,
    test_line_0_is_ordinary_unless_it_is_said_to_be_null,
)
