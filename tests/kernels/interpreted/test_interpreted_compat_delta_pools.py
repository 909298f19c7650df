"""The tests of the delta rules over engines' pools again, some of them: the Triton kernels in Triton's interpreter."""

from __future__ import annotations

import kernels.compat.test_compat_delta_pools as checks
import pytest
import torch
from rigs.kernels.paths import InterpretedPath


@pytest.mark.parametrize("name", ["padding", "ragged"])
def test_chunks_of_a_pool_match_the_reference(name: str) -> None:
    checks.test_chunks_of_a_pool_match_the_reference(InterpretedPath("cpu", torch.float16), name, inplace=True)


def test_chunks_of_kda_over_a_pool_match_the_reference() -> None:
    checks.test_chunks_of_kda_over_a_pool_match_the_reference(
        InterpretedPath("cpu", torch.float16), "padding", "bounded"
    )


@pytest.mark.parametrize("name", ["decode", "verify"])
def test_sigmoid_update_as_vllm_calls_it_matches_the_reference(exact_path: InterpretedPath, name: str) -> None:
    checks.test_sigmoid_update_as_vllm_calls_it_matches_the_reference(exact_path, name)


@pytest.mark.parametrize("gate", ["gated", "bounded"])
def test_packed_tokens_match_the_reference(exact_path: InterpretedPath, gate: str) -> None:
    checks.test_packed_tokens_match_the_reference(exact_path, "padding", gate)
