"""The tests of the Mamba2 recurrence again: its Triton kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernels.batches import Row
from kernels.mamba_batches import MambaLayer, make_mamba_batch
from kernels.paths import InterpretedPath
from kernels.test_mamba2 import (
    test_a_draft_that_is_not_finite_leaves_those_before_it_alone,
    test_a_step_that_is_not_finite_is_not_clamped_away,
    test_mamba2_in_chunks_is_mamba2_token_by_token,
    test_mamba2_is_right_for_the_smallest_and_largest_steps,
    test_mamba2_matches_the_reference,
    test_mamba2_of_many_heads_matches_the_reference,
    test_mamba2_replay_leaves_what_committing_leaves,
    test_mamba2_replays_any_accepted_count,
    test_mamba2_rounds_a_16_bit_state_once,
    test_mamba2_row_does_not_depend_on_its_neighbours,
    test_mamba2_splits_without_a_seam,
    test_mamba2_survives_the_strongest_decay,
)
from kernels.tolerance import assert_close

from deltaline_kernels.mamba2.heads import Heads

__all__ = [
    "test_a_draft_that_is_not_finite_leaves_those_before_it_alone",
    "test_a_step_that_is_not_finite_is_not_clamped_away",
    "test_mamba2_in_chunks_is_mamba2_token_by_token",
    "test_mamba2_is_right_for_the_smallest_and_largest_steps",
    "test_mamba2_matches_the_reference",
    "test_mamba2_of_many_heads_matches_the_reference",
    "test_mamba2_replay_leaves_what_committing_leaves",
    "test_mamba2_replays_any_accepted_count",
    "test_mamba2_rounds_a_16_bit_state_once",
    "test_mamba2_row_does_not_depend_on_its_neighbours",
    "test_mamba2_splits_without_a_seam",
    "test_mamba2_survives_the_strongest_decay",
]


@pytest.mark.parametrize("rows", [[Row(1)] * 2, [Row(3, verify=True, replayed=2), Row(1, fresh=True), Row(20)]])
def test_mamba2_shifts_lines(exact_path: InterpretedPath, rows: list[Row]) -> None:
    """Engines have no zero line: the pools that they pass begin with what `Rows` calls line 1."""
    from deltaline_kernels.mamba2.launch import mamba2_triton

    layer = MambaLayer()
    whole = make_mamba_batch(rows, exact_path, layer)
    shifted = whole.clone()
    want = whole.run(exact_path)
    got = torch.empty_like(want)
    heads = Heads(layer.G, layer.H, layer.P, layer.S)
    lined = (shifted.state[1:], shifted.drafts[1:])
    mamba2_triton(*shifted.inputs, *lined, shifted.rows, got, heads, line_shift=1)
    assert_close("y", got, want, torch.float32)
    assert_close("state", shifted.state, whole.state, torch.float32)
    assert_close("drafts", shifted.drafts, whole.drafts, torch.float32)
