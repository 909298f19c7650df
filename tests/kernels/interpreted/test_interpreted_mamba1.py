"""The tests of the Mamba-1 recurrence again: its Triton kernel in Triton's interpreter.

Not all of them: a token of a few channels takes the interpreter milliseconds.
"""

from __future__ import annotations

import kernels.mamba1.test_mamba1 as checks
import pytest
import torch
from kernels.mamba1.test_mamba1 import (
    test_a_draft_that_is_not_finite_leaves_those_before_it_alone,
    test_a_value_that_is_not_finite_stays_in_its_channel,
    test_mamba1_replay_leaves_what_committing_leaves,
    test_mamba1_replays_any_accepted_count,
    test_mamba1_row_does_not_depend_on_its_neighbours,
    test_mamba1_takes_steps_keys_and_gates_in_fp32,
    test_mamba1_without_a_gate_matches_the_reference,
    test_small_steps_are_exact,
)
from rigs.kernels.batches import Row
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.recurrence_checks import (
    check_against_reference,
    check_shifted_lines,
    check_written_elsewhere,
    same_bits,
)
from rigs.kernels.scan_batches import ScanLayer, make_scan_batch

from deltaline_kernels.mamba1 import plan
from deltaline_kernels.mamba1.inputs import ScanSizes
from deltaline_kernels.mamba1.plan import choose_tile

__all__ = [
    "test_a_draft_that_is_not_finite_leaves_those_before_it_alone",
    "test_a_value_that_is_not_finite_stays_in_its_channel",
    "test_mamba1_replay_leaves_what_committing_leaves",
    "test_mamba1_replays_any_accepted_count",
    "test_mamba1_row_does_not_depend_on_its_neighbours",
    "test_mamba1_takes_steps_keys_and_gates_in_fp32",
    "test_mamba1_without_a_gate_matches_the_reference",
    "test_small_steps_are_exact",
]

CASES = [name for name, (_, rows) in checks.CASES.items() if sum(row.length for row in rows) < 40]


@pytest.mark.parametrize("case", CASES)
def test_mamba1_matches_the_reference(path: InterpretedPath, case: str) -> None:
    checks.test_mamba1_matches_the_reference(path, case)


def test_programs_of_several_parts_leave_the_same_states(
    exact_path: InterpretedPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As there are for many rows."""
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(5)]
    one, many = (make_scan_batch(rows, exact_path, ScanLayer(D=39)) for _ in range(2))
    one.run(exact_path)
    assert choose_tile(ScanSizes(1, 39, 16), 3, 4).parts == 1
    monkeypatch.setattr(plan, "PROGRAMS", 1)
    assert choose_tile(ScanSizes(1, 39, 16), 3, 4).parts == 4
    check_against_reference(many, exact_path, exact_path.dtype)
    assert same_bits(many.state, one.state) and same_bits(many.drafts, one.drafts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_state_is_rounded_once(exact_path: InterpretedPath, dtype: torch.dtype) -> None:
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(9)]
    check_against_reference(make_scan_batch(rows, exact_path, state_dtype=dtype), exact_path, dtype)


@pytest.mark.parametrize("rows", [[Row(1)] * 2, [Row(3, verify=True, replayed=2), Row(1, fresh=True), Row(20)]])
def test_mamba1_shifts_lines(exact_path: InterpretedPath, rows: list[Row]) -> None:
    check_shifted_lines(make_scan_batch(rows, exact_path), exact_path)


def test_states_are_written_elsewhere(exact_path: InterpretedPath) -> None:
    check_written_elsewhere(make_scan_batch([Row(1), Row(3, verify=True, replayed=2), Row(9)], exact_path))
