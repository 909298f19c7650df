"""The tests of states again, with the paths of this folder: the Triton kernels in Triton's interpreter."""

from __future__ import annotations

import kernels.test_states as checks
import pytest
import torch
from kernels.test_states import KINDS, MAKERS, test_a_state_for_each_token_leaves_outputs_as_they_are
from rigs.kernels.paths import InterpretedPath

__all__ = ["test_a_state_for_each_token_leaves_outputs_as_they_are"]


# Of the sizes that have kernels of their own.
HALF = InterpretedPath("cpu", torch.float16)
LARGE = pytest.mark.parametrize("kind", ["delta", "mamba2"])


@LARGE
def test_lines_may_lie_apart_by_whole_vectors(kind: str) -> None:
    checks.test_lines_may_lie_apart(HALF, kind, 64, 64)


@KINDS
def test_lines_may_lie_apart_by_a_few_bytes(exact_path: InterpretedPath, kind: str) -> None:
    checks.test_lines_may_lie_apart(exact_path, kind, 4, 0)


def test_lines_of_a_convolution_may_lie_apart(exact_path: InterpretedPath) -> None:
    checks.test_lines_of_a_convolution_may_lie_apart(exact_path)


@LARGE
def test_states_are_written_elsewhere(kind: str) -> None:
    checks.test_states_are_written_elsewhere(HALF, kind)


@KINDS
def test_a_state_of_fp16_is_rounded_once(path: InterpretedPath, kind: str) -> None:
    checks.test_a_state_of_any_dtype_is_rounded_once(path, kind, torch.float16)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_token_may_leave_its_state(exact_path: InterpretedPath, kind: str, dtype: torch.dtype) -> None:
    checks.test_every_token_may_leave_its_state(exact_path, kind, dtype)
