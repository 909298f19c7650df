"""The engines' selective scans again: the Triton kernel in Triton's interpreter, beside what builds its rows."""

from __future__ import annotations

import kernels.compat.test_compat_selective_scan as checks
import pytest
import torch
from kernels.compat.test_compat_selective_scan import (
    test_scan_without_what_may_be_left_out,
    test_update_of_offsets_and_tables,
    test_varlen_scan_of_a_batch_is_that_of_its_rows,
)
from rigs.kernels.paths import InterpretedPath


@pytest.mark.parametrize("n", [0, 1, 13])
def test_scan_matches_the_recurrence(exact_path: InterpretedPath, n: int) -> None:
    checks.test_scan_matches_the_recurrence(exact_path, n, 2)


def test_varlen_scan_matches_the_plain_one(path: InterpretedPath) -> None:
    checks.test_varlen_scan_matches_the_plain_one(path, by_place=False)


@pytest.mark.parametrize("name", checks.UPDATES)
def test_update_of_values_per_channel(exact_path: InterpretedPath, name: str) -> None:
    checks.test_update_of_values_per_channel(exact_path, name, torch.float16)
