"""The tests of the engines' KDA again, some of them: the Triton kernels in Triton's interpreter."""

from __future__ import annotations

import kernels.compat.test_compat_kda as checks
import pytest
import torch
from kernels.compat.test_compat_kda import (
    test_flash_writes_nothing_behind_its_output,
    test_gate_matches_the_plain_one,
    test_next_tokens_of_a_table_match_the_plain_rule,
)
from rigs.kernels.paths import InterpretedPath

from deltaline_kernels.compat import chunk_kda


@pytest.mark.parametrize("name", ["ragged", "empty", "fresh"])
def test_sequences_match_the_plain_rule(name: str) -> None:
    path = InterpretedPath("cpu", torch.float16)
    checks.test_sequences_match_the_plain_rule(path, name, v_first=False, function=chunk_kda)


@pytest.mark.parametrize("given", ["both", "no-rates", "doubled"])
def test_gates_in_the_kernel_match_the_plain_ones(path: InterpretedPath, given: str) -> None:
    checks.test_gates_in_the_kernel_match_the_plain_ones(path, given, -5.0, chunk_kda)


def test_next_tokens_of_slots_match_the_plain_rule(exact_path: InterpretedPath) -> None:
    checks.test_next_tokens_of_slots_match_the_plain_rule(exact_path, [4, -1, 7])


def test_sigmoid_update_of_kda_matches_the_plain_rule(exact_path: InterpretedPath) -> None:
    checks.test_sigmoid_update_of_kda_matches_the_plain_rule(exact_path, (1.0, 20.0), None, "by-head")


def test_flash_matches_the_plain_rule() -> None:
    checks.test_flash_matches_the_plain_rule(InterpretedPath("cpu", torch.float16), "states", dense=False)
