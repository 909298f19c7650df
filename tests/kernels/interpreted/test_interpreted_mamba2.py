"""The tests of the Mamba2 recurrence again: its Triton kernels in Triton's interpreter.

Not all of them: a token of one head takes the interpreter milliseconds.
"""

from __future__ import annotations

import kernels.mamba2.test_mamba2 as checks
import pytest
import torch
from kernels.mamba2.test_mamba2 import (
    test_a_draft_that_is_not_finite_leaves_those_before_it_alone,
    test_a_step_that_is_not_finite_is_not_clamped_away,
    test_mamba2_replay_leaves_what_committing_leaves,
    test_mamba2_replays_any_accepted_count,
)
from kernels.mamba2.test_mamba2_regressions import (
    check_small_steps,
    test_a_decode_is_a_verify_of_one_token,
)
from rigs.kernels.batches import Row
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import InterpretedPath, Path
from rigs.kernels.recurrence_checks import check_against_reference, check_shifted_lines

CASES = [name for name, (_, rows) in checks.CASES.items() if sum(row.length for row in rows) < 40]


@pytest.mark.parametrize("case", CASES)
def test_mamba2_matches_the_reference(path: InterpretedPath, case: str) -> None:
    checks.test_mamba2_matches_the_reference(path, case)


def test_mamba2_of_many_heads_matches_the_reference(path: InterpretedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.test_mamba2_of_many_heads_matches_the_reference(path, "verify-that-writes-nothing", monkeypatch)


def test_mamba2_of_many_rows_rounds_a_16_bit_state_once(exact_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.use_many_heads(monkeypatch)
    batch = make_mamba_batch([Row(1), Row(1, replayed=2)], exact_path, MambaLayer(P=40), state_dtype=torch.bfloat16)
    check_against_reference(batch, exact_path, torch.bfloat16)


def test_small_steps_are_exact(exact_path: InterpretedPath) -> None:
    check_small_steps(exact_path)


@pytest.mark.parametrize("rows", [[Row(1)] * 2, [Row(3, verify=True, replayed=2), Row(1, fresh=True), Row(20)]])
def test_mamba2_shifts_lines(exact_path: InterpretedPath, rows: list[Row]) -> None:
    check_shifted_lines(make_mamba_batch(rows, exact_path), exact_path)
