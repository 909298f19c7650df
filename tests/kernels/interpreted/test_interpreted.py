"""The tests of the kernels again, with the paths of this folder: the Triton kernels in Triton's interpreter."""

from __future__ import annotations

import kernels.conv1d.test_conv1d as convolution
import numpy
import pytest
import torch
from kernels.conv1d.test_conv1d import (
    test_conv_has_every_width,
    test_conv_replays_any_accepted_count,
    test_conv_row_does_not_depend_on_its_neighbours,
    test_conv_splits_its_output,
    test_conv_splits_without_a_seam,
    test_conv_verifies_many_tokens,
)
from kernels.gated_delta.test_gated_delta import (
    test_delta_in_pieces_is_delta_at_once,
    test_delta_is_right_for_correlated_keys,
    test_delta_matches_the_reference,
    test_delta_of_many_heads_matches_the_reference,
    test_delta_replay_leaves_what_committing_leaves,
    test_delta_replays_any_accepted_count,
    test_delta_rounds_a_16_bit_state_once,
    test_delta_survives_the_strongest_gates,
    test_delta_takes_gates_and_keys_as_they_come,
)
from kernels.gated_delta.test_gated_delta_chunks import LAYERS, check_norms_of_queries, in_parts
from kernels.norm.test_norm import (
    test_a_gate_may_be_a_sigmoid,
    test_a_norm_of_what_is_gated_is_that_of_each_group,
    test_norm_matches_the_reference,
    test_norm_of_zeros_is_zero,
)
from kernels.test_activation import check_far_silu, check_silu
from rigs.kernels.batches import Layer, Row, make_batch
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import check_against_reference, check_shifted_lines
from rigs.kernels.walks import ALIGNED


@pytest.mark.parametrize("case", [case for case in convolution.CASES if case != "three-pieces"])
def test_conv_matches_the_reference(exact_path: InterpretedPath, case: str) -> None:
    convolution.test_conv_matches_the_reference(exact_path, case)


@pytest.mark.parametrize("case", ["mixed", "63-64-65", "many-verifies"])
def test_conv_of_16_bits_matches_the_reference(case: str) -> None:
    convolution.test_conv_matches_the_reference(InterpretedPath("cpu", torch.float16), case)


def test_conv_has_any_number_of_channels(exact_path: InterpretedPath) -> None:
    convolution.test_conv_has_any_number_of_channels(exact_path, 513)


def test_silu_is_right_to_the_last_place_in_fp16() -> None:
    """Only in fp16: the interpreter rounds the product of a fused multiplication and addition."""
    check_silu(InterpretedPath("cpu", torch.float16))


def test_silu_is_right_far_from_zero(path: InterpretedPath) -> None:
    # Infinite exponentials are meant; NumPy warns of them.
    with numpy.errstate(over="ignore", invalid="ignore"):
        check_far_silu(path)


def test_delta_shifts_lines(exact_path: InterpretedPath) -> None:
    rows = [Row(3, verify=True, replayed=2), Row(1, fresh=True), Row(2, to="other"), Row(20, replayed=1)]
    check_shifted_lines(make_batch(rows, exact_path, Layer(H=1, HV=1)), exact_path)


@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no-norms"])
def test_delta_divides_outputs_by_norms_of_queries(norms: bool) -> None:
    check_norms_of_queries(InterpretedPath("cpu", torch.float16), norms=norms)


@pytest.mark.parametrize(
    ("length", "slow"), [(0, False), (64, False), (64, True)], ids=["whole", "in-parts", "in-parts-that-remember"]
)
def test_delta_in_tiles_matches_the_reference(length: int, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = InterpretedPath("cpu", torch.float16)
    in_parts(monkeypatch, length)
    rows = [Row(5, to="other"), Row(150, replayed=2), Row(65, skipped=True), Row(64, fresh=True)]
    batch = make_batch(rows, path, LAYERS["64-64"], max_short=1, padding=ALIGNED)
    if slow:
        # Decays and strengths so small that what stands before a part is still seen behind it.
        assert batch.A_log is not None
        batch.A_log.fill_(-6.0)
        batch.b.fill_(-4.0)
    check_against_reference(batch, path, torch.float16)
