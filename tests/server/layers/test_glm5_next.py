"""glm5_next against transformers: its own residual streams, their mean, limits of gates, and where it is not sparse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.layer_oracle import Oracle, WithEnds, assert_close, assert_same_life, serve

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.hyper_connection import head_tensors
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.model import open_plan

pytestmark = pytest.mark.usefixtures("no_gradients")

HIDDEN, STREAMS, SELECTED = 64, 2, 64
ALL = range(4)
SIZES: dict[str, Any] = {"hidden": HIDDEN, "intermediate": 96, "head_dim": 16, "layers": len(ALL)}
SIZES |= {"attn_implementation": "eager"}
SIZES |= {"layer_types": ["linear_attention", "deepseek_sparse_attention"] * 2, "swiglu_limit": 0.7}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "shared indexers": {
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
        "linear_lower_bound": -2.0,
    },
}


@pytest.fixture(scope="module", params=KINDS)
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Any]
) -> Oracle:
    directory = tmp_path_factory.mktemp("glm5_next")
    model = write_checkpoint(directory, "glm5_next", **(SIZES | KINDS[request.param]))
    return Oracle(model.model.language_model, directory)


@pytest.mark.parametrize("length", [1, 23])
def test_each_layer_by_itself(oracle: Oracle, device: str, length: int) -> None:
    for scope in Scope:
        hidden = torch.randn(length, HIDDEN) if scope is Scope.MIXER else torch.randn(length, STREAMS, HIDDEN)
        spans = [range(i, i + 1) for i in ALL[:2]]
        served = serve(oracle.options(device, scope=scope, spans=spans, max_context=SELECTED))
        for i, span in enumerate(spans):
            assert_close(served.step(hidden, [1], [length], span=i), oracle.run(span, hidden, scope=scope))


def test_prefill_decode_verify_and_commit(oracle: Oracle, device: str) -> None:
    assert_same_life(WithEnds(oracle.model, oracle.directory), device, ALL)


def test_where_it_would_be_sparse_it_is_refused(oracle: Oracle) -> None:
    told = r"--max-context: expected at most 64 \(index_topk\), up to which its indexer selects all tokens.*got "
    for max_context, got in ((0, "none"), (65, "65")):
        with pytest.raises(ModelError, match=told + got), open_plan(oracle.options(max_context=max_context)):
            pass
    with open_plan(oracle.options(max_context=SELECTED)) as plan:
        assert plan.left_out == "" and len(plan.layers) == len(ALL)


def test_what_a_config_does_not_say_is_as_in_transformers(oracle: Oracle, tmp_path: Path) -> None:
    """Layers, MLPs, streams and limits; the language model by itself has the same keys and no other around them."""
    raw = json.loads((oracle.directory / "config.json").read_text())["text_config"]
    whole = ModelConfig.from_mapping(raw)
    assert whole.model_type == "glm5_next_text" and whole.mlp_limit == 0.7 and whole.streams is not None
    assert whole.streams.averages and head_tensors(whole.streams, HIDDEN) == {}
    for key in ("layer_types", "mlp_layer_types", "hc_mult", "swiglu_limit", "index_topk"):
        raw.pop(key)
    usual = ModelConfig.from_mapping(raw)
    assert [str(layer.mixer) for layer in usual.layers] == ["kda", "kda", "kda", "latent_attention"]
    assert [str(layer.mlp) for layer in usual.layers] == ["dense"] * 3 + ["mixture_of_experts"]
    assert usual.streams is not None and usual.streams.count == 4 and usual.mlp_limit == 10.0
    with pytest.raises(ModelError, match=r"--max-context: expected at most 2048 \(index_topk\)"):
        usual.with_context(2049)
