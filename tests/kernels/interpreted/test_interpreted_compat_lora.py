"""The tests of the engines' LoRA functions again: the Triton kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from kernels.compat.test_compat_lora import (
    test_expand_matches_the_loops,
    test_only_active_adapters_count,
    test_shrink_matches_the_loops,
    test_tokens_of_a_larger_graph_are_not_computed,
    test_weights_may_have_a_dimension_of_one,
    test_what_is_added_is_rounded_once,
)
from kernels.lora.test_lora import make_dense

from deltaline_kernels.compat import lora


@pytest.fixture(autouse=True, params=["table", "dense"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the table, or dense ones."""
    if request.param == "dense":
        make_dense(monkeypatch, (torch.float32, torch.float16))
