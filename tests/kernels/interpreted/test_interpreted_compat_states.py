"""The tests of engines' states again: the Triton kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import kernels.compat.test_compat_states as checks
import pytest
import torch
from kernels.compat.test_compat_states import (
    test_a_slot_that_pads_keeps_nothing,
    test_a_table_leaves_outputs_as_they_are_without_it,
    test_rows_without_slots_leave_states_in_a_final_tensor,
    test_states_of_sequences_are_read_where_they_lie,
)
from rigs.kernels.paths import InterpretedPath

__all__ = [
    "test_a_slot_that_pads_keeps_nothing",
    "test_a_table_leaves_outputs_as_they_are_without_it",
    "test_rows_without_slots_leave_states_in_a_final_tensor",
    "test_states_of_sequences_are_read_where_they_lie",
]

# Not to bf16: the interpreter cuts where it should round.
MOVES = [name for name, move in checks.MOVES.items() if torch.bfloat16 not in (move.final, move.states)]


@pytest.mark.parametrize("name", MOVES)
def test_recurrent_leaves_states_elsewhere(exact_path: InterpretedPath, name: str) -> None:
    checks.test_recurrent_leaves_states_elsewhere(exact_path, name)


@pytest.mark.parametrize("name", ["final-of-empty"])
def test_sigmoid_update_leaves_states_elsewhere(path: InterpretedPath, name: str) -> None:
    checks.test_sigmoid_update_leaves_states_elsewhere(path, name)


@pytest.mark.parametrize("name", MOVES)
def test_update_of_mamba2_leaves_states_elsewhere(exact_path: InterpretedPath, name: str) -> None:
    checks.test_update_of_mamba2_leaves_states_elsewhere(exact_path, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_scan_leaves_states_in_a_pool_that_lies_apart(path: InterpretedPath, dtype: torch.dtype) -> None:
    checks.test_a_scan_leaves_states_in_a_pool_that_lies_apart(path, dtype)
