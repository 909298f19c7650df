"""The tests of short rows that are computed at once again, in Triton's interpreter; in fp16: fp32 goes another way."""

from __future__ import annotations

import pytest
import torch
from kernels.gated_delta.test_gated_delta_verify import (
    SMALL,
    make_far_apart,
    test_a_draft_that_is_not_finite_leaves_those_before_it_alone,
    test_delta_of_many_heads_at_once_matches_the_reference,
    test_delta_of_short_rows_is_right_for_correlated_keys,
    test_delta_of_short_rows_is_right_for_gates_far_apart,
    test_delta_of_short_rows_matches_the_reference,
    test_delta_of_short_rows_rounds_a_16_bit_state_once,
    test_delta_of_short_rows_survives_the_strongest_gates,
    test_delta_of_short_rows_takes_gates_and_keys_as_they_come,
    test_delta_replay_beside_tokens_leaves_what_committing_leaves,
    test_delta_row_does_not_depend_on_its_neighbours,
)
from rigs.kernels.batches import Row, make_batch
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.tolerance import assert_close


@pytest.fixture
def path() -> InterpretedPath:
    return InterpretedPath("cpu", torch.float16)


def test_a_verify_is_as_exact_as_fp32(path: InterpretedPath) -> None:
    """What goes through the matrix instructions in two halves: the limits of fp16 would not tell one half from both."""
    batch = make_batch([Row(5, verify=True, replayed=3)], path, SMALL)
    reference = batch.clone()
    reference.run_reference()
    batch.run(path)
    assert_close("state", batch.state, reference.state, torch.float32)
    assert_close("drafts", batch.drafts, reference.drafts, torch.float32)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_verify_is_as_exact_behind_strong_gates(path: InterpretedPath, seed: int) -> None:
    """Where a difference of sums of gates would be off by what the strong ones of them round away."""
    batch = make_far_apart(path, seed, -1e4)
    reference = batch.clone()
    reference.run_reference()
    batch.run(path)
    assert_close("state", batch.state, reference.state, torch.float32)
    updates = slice(0, -SMALL.HV)
    assert_close("drafts", batch.drafts[..., updates], reference.drafts[..., updates], torch.float32)


def test_a_batch_of_short_rows_goes_one_way(path: InterpretedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results don't tell: they are the same but for rounding."""
    from deltaline_kernels.gated_delta import launch

    seen = []
    for name in ("launch_recurrent", "launch_verify", "launch_chunk"):
        monkeypatch.setattr(launch, name, lambda *args, name=name: seen.append((name, args[2].num_rows)))
    make_batch([Row(5, verify=True), Row(1)], path, SMALL).run(path)
    make_batch([Row(1), Row(1, verify=True, replayed=2)], path, SMALL).run(path)
    assert seen == [("launch_verify", 2), ("launch_chunk", 0), ("launch_recurrent", 2), ("launch_chunk", 0)]
