"""Attention layers against transformers where checkpoints differ: rotary embeddings; and what pages may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.layer_oracle import MAX_DRAFT, Oracle, assert_close, serve
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.models.config import Scope

pytestmark = pytest.mark.usefixtures("no_gradients")

HIDDEN = 128
SIZES: dict[str, Any] = {
    "hidden": HIDDEN,
    "intermediate": 96,
    "layer_types": ["linear_attention", "full_attention"],
    "layers": 2,
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20, "beta_fast": 4, "rope_theta": 50.0}


@pytest.fixture
def make_oracle(tmp_path: Path, write_checkpoint: Callable[..., Any]) -> Callable[..., Oracle]:
    return lambda **changes: Oracle(write_checkpoint(tmp_path, "qwen3_5_text", **SIZES, **changes), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 1, 0], "mrope_interleaved": True}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {"rope_parameters": YARN, "partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 32, "max_position_embeddings": 50},
    ],
    ids=["half", "mrope", "whole", "yarn", "dynamic"],
)
def test_rotary_embeddings_are_those_of_the_config(make_oracle: Callable[..., Oracle], changes: dict[str, Any]) -> None:
    oracle = make_oracle(**changes)
    hidden, span = torch.randn(50, HIDDEN), range(1, 2)
    served = serve(oracle.options(scope=Scope.MIXER, spans=[span]))
    ours = torch.cat([served.step(hidden[:49], [1], [49]), served.step(hidden[49:], [1], [1])])
    assert_close(ours, oracle.run(span, hidden, scope=Scope.MIXER))


def test_a_page_that_was_anothers_tells_nothing(make_oracle: Callable[..., Oracle]) -> None:
    oracle, hidden, other = make_oracle(), torch.randn(37, HIDDEN), torch.randn(60, HIDDEN)
    results: list[Tensor] = []
    for served in (serve(oracle.options()), serve(oracle.options())):
        if results:  # the second time, on the pages of a sequence that is over
            served.step(other, [1], [60])
            served.end(1)
        results.append(torch.cat([served.step(hidden[:30], [1], [30]), served.step(hidden[30:], [1], [7])]))
    assert torch.equal(results[0], results[1])


def test_skipped_rows_store_nothing(make_oracle: Callable[..., Oracle]) -> None:
    served = serve(make_oracle().options())
    rows = Rows.build([2], [0], [-1], [2], [0], [0], max_short=MAX_DRAFT, device="cpu")
    served.model.forward(0, torch.randn(2, HIDDEN), rows, served.pool)
    [cache] = [state for state in served.pool.layers if isinstance(state, KvState)]
    assert cache.k_pages.isnan().all() and cache.v_pages.isnan().all()
