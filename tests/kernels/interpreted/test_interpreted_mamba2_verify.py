"""The tests of short rows of the Mamba2 recurrence again, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.mamba2.test_mamba2_verify import (
    SMALL,
    test_a_short_draft_that_is_not_finite_leaves_those_before_it_alone,
    test_mamba2_of_many_short_rows_matches_the_reference,
    test_mamba2_of_short_rows_is_right_for_decays_far_apart,
    test_mamba2_of_short_rows_is_right_for_the_smallest_and_largest_steps,
    test_mamba2_of_short_rows_matches_the_reference,
    test_mamba2_of_short_rows_rounds_a_16_bit_state_once,
    test_mamba2_replay_beside_tokens_leaves_what_committing_leaves,
    test_mamba2_short_row_does_not_depend_on_its_neighbours,
)
from rigs.kernels.batches import Row
from rigs.kernels.mamba_batches import make_mamba_batch
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.tolerance import assert_close

from deltaline_kernels.rows import StateLines


@pytest.fixture
def path() -> InterpretedPath:
    """fp16: of fp32, rows go token by token; bf16 is wrong in the interpreter."""
    return InterpretedPath("cpu", torch.float16)


def test_a_verify_is_as_exact_as_fp32(path: InterpretedPath) -> None:
    """What goes through the matrix instructions in two halves: the limits of fp16 would not tell one half from both."""
    batch = make_mamba_batch([Row(5, verify=True, replayed=3)], path, SMALL)
    reference = replace(batch.clone(), xBC=batch.xBC.float(), dt=batch.dt.float())
    want = reference.run_reference()
    y = torch.empty_like(want)
    batch.launch(StateLines(batch.state, batch.drafts), batch.rows, y)
    assert_close("y", y, want, torch.float32)
    assert_close("state", batch.state, reference.state, torch.float32)
    assert_close("drafts", batch.drafts, reference.drafts, torch.float32)


def test_a_batch_of_short_rows_goes_one_way(path: InterpretedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results don't tell: they are the same but for rounding."""
    from deltaline_kernels.mamba2 import launch

    seen = []
    for name in ("launch_recurrent", "launch_verify"):
        monkeypatch.setattr(launch, name, lambda *args, name=name: seen.append((name, args[2].num_rows)))
    make_mamba_batch([Row(5, verify=True), Row(1)], path, SMALL).run(path)
    make_mamba_batch([Row(1), Row(1, verify=True, replayed=2)], path, SMALL).run(path)
    assert [way for way in seen if way[1]] == [("launch_verify", 2), ("launch_recurrent", 2)]
