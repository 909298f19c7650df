"""The tests of short rows of KDA at once again, in Triton's interpreter; in fp16: fp32 goes another way."""

from __future__ import annotations

import pytest
import torch
from kernels.kda.test_kda_verify import (
    SMALL,
    make_correlated,
    test_a_short_draft_of_kda_that_is_not_finite_leaves_those_before_it_alone,
    test_kda_of_short_rows_is_right_for_correlated_keys,
    test_kda_of_short_rows_matches_the_reference,
    test_kda_of_short_rows_rounds_a_16_bit_state_once,
    test_kda_of_short_rows_survives_decays_that_overflow,
    test_kda_of_short_rows_takes_a_state_that_programs_share,
    test_kda_of_short_rows_takes_gates_and_keys_as_they_come,
    test_kda_replay_beside_tokens_leaves_what_committing_leaves,
    test_kda_row_at_once_does_not_depend_on_its_neighbours,
)
from rigs.kernels.batches import Row
from rigs.kernels.kda_batches import make_kda_batch
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import check_shifted_lines, check_written_elsewhere
from rigs.kernels.tolerance import assert_close


@pytest.fixture
def path() -> InterpretedPath:
    return InterpretedPath("cpu", torch.float16)


@pytest.mark.parametrize("case", ["usual", "correlated"])
def test_a_verify_of_kda_is_as_exact_as_fp32(path: InterpretedPath, case: str) -> None:
    """What goes through the matrix instructions in parts: the limits of fp16 would not tell one part from all."""
    rows = [Row(5, verify=True, replayed=3)]
    batch = make_kda_batch(rows, path, SMALL) if case == "usual" else make_correlated(path, 5.0)
    reference = batch.clone()
    reference.run_reference()
    batch.run(path)
    assert_close("state", batch.state, reference.state, torch.float32)
    assert_close("drafts", batch.drafts, reference.drafts, torch.float32)
    # Without the rest of one side it is 1.4e-5, which that limit would let pass.
    difference = (batch.drafts - reference.drafts).nan_to_num().norm()
    assert difference < 2e-6 * reference.drafts.nan_to_num().norm()


def test_kda_at_once_shifts_lines_and_writes_elsewhere(path: InterpretedPath) -> None:
    rows = [Row(3, verify=True, replayed=2), Row(1, fresh=True), Row(2, to="other"), Row(0)]
    check_shifted_lines(make_kda_batch(rows, path, SMALL), path)
    check_written_elsewhere(make_kda_batch([Row(1), Row(2, to="other"), Row(3, replayed=1), Row(0)], path, SMALL))


def test_a_batch_of_short_rows_of_kda_goes_one_way(path: InterpretedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results don't tell: they are the same but for rounding."""
    from deltaline_kernels.kda import launch

    seen = []
    for name in ("launch_recurrent", "launch_verify", "launch_chunk"):
        monkeypatch.setattr(launch, name, lambda *args, name=name: seen.append((name, args[2].num_rows)))
    make_kda_batch([Row(5, verify=True), Row(1)], path, SMALL).run(path)
    make_kda_batch([Row(1), Row(1, verify=True, replayed=2)], path, SMALL).run(path)
    assert seen == [("launch_verify", 2), ("launch_chunk", 0), ("launch_recurrent", 2), ("launch_chunk", 0)]
