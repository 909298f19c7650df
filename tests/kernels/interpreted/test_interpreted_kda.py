"""The tests of KDA again, in Triton's interpreter: token by token in fp32, in chunks in fp16."""

from __future__ import annotations

import math

import pytest
import torch
from kernels.kda import test_kda as tests
from kernels.kda.test_kda import (
    test_a_draft_of_kda_that_is_not_finite_leaves_those_before_it_alone,
    test_equal_decays_of_all_channels_are_those_of_a_head,
    test_kda_is_right_for_correlated_keys,
    test_kda_of_many_heads_matches_the_reference,
    test_kda_replay_leaves_what_committing_leaves,
    test_kda_replays_any_accepted_count,
    test_kda_rounds_a_16_bit_state_once,
    test_kda_row_does_not_depend_on_its_neighbours,
    test_kda_survives_decays_that_overflow,
    test_kda_takes_gates_and_keys_as_they_come,
)
from rigs.kernels.batches import Row
from rigs.kernels.kda_batches import KdaLayer, make_kda_batch
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import check_against_reference, check_shifted_lines, check_written_elsewhere

HALF = InterpretedPath("cpu", torch.float16)


# Half a minute each: what they have of their own the others have too.
LARGE = {"heads-of-128", "heads-of-256", "grouped-heads-of-wide-values", "chunks-that-follow-each-other"}


@pytest.mark.parametrize("case", [case for case in tests.CASES if case not in LARGE])
def test_kda_matches_the_reference(exact_path: InterpretedPath, case: str) -> None:
    tests.test_kda_matches_the_reference(exact_path, case)


@pytest.mark.parametrize("layer", [KdaLayer(), KdaLayer(H=2, HV=4, K=70, V=35), KdaLayer(lower_bound=-5.0)], ids=str)
def test_kda_in_chunks_matches_the_reference(layer: KdaLayer) -> None:
    rows = [Row(1), Row(5, to="other"), Row(50, replayed=2), Row(35, skipped=True), Row(0, replayed=1), Row(32)]
    check_against_reference(make_kda_batch(rows, HALF, layer, max_short=1), HALF, torch.float16)


@pytest.mark.parametrize("strength", [6.0, 40.0, math.inf])
def test_kda_in_chunks_survives_decays_that_overflow(strength: float) -> None:
    tests.test_kda_survives_decays_that_overflow(HALF, strength)


def test_kda_shifts_lines(exact_path: InterpretedPath) -> None:
    rows = [Row(3, verify=True, replayed=2), Row(1, fresh=True), Row(2, to="other"), Row(20, replayed=1)]
    check_shifted_lines(make_kda_batch(rows, exact_path), exact_path)
    check_shifted_lines(make_kda_batch(rows, HALF), HALF)


def test_kda_writes_elsewhere() -> None:
    rows = [Row(1), Row(2, to="other"), Row(20, replayed=1), Row(0)]
    check_written_elsewhere(make_kda_batch(rows, HALF))
