"""Configs of published models, each with its source: all layers are served, and are as large as is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaline_server.computing import check
from deltaline_server.config import Config
from deltaline_server.sizing.__main__ import report
from deltaline_server.sizing.sizes import Sizes, size

CONFIGS = Path(__file__).with_name("configs")
# Billions of parameters, embeddings among them. Of Zamba2's 7.3, 11 times the 0.334 of a shared block are counted more:
# each of 13 uses of 2 blocks has its own. FalconH1Config's defaults are no model's.
BILLIONS = {
    "bamba-9b": 9.8,
    "falcon-mamba-7b": 7.27,
    "glm-5.3-flash": 313.3,
    "granite-4.0-h-small": 32.2,
    "jamba-v0.1": 51.6,
    "kimi-linear-48b-a3b": 49.1,
    "lfm2-1.2b": 1.17,
    "lfm2-8b-a1b": 8.34,
    "mamba-2.8b": 2.77,
    "mamba-codestral-7b": 7.3,
    "nemotron-3-nano-30b-a3b": 31.6,
    "nemotron-3-nano-4b": 3.97,
    "nemotron-h-8b": 8.1,
    "olmo-hybrid-7b": 7.4,
    "qwen3-next-80b-a3b": 79.7,
    "qwen3.5-35b-a3b": 34.7,
    "qwen3.5-4b": 4.2,
    "qwen3.5-9b": 9.0,
    "zamba2-7b": 7.3 + 11 * 0.334,
}


def read(name: str) -> tuple[dict[str, Any], Config]:
    path = CONFIGS / f"{name}.json"
    raw: dict[str, Any] = json.loads(path.read_text())
    told = ["--random-init", str(path), "--device", "cpu", "--max-sequences", "4"]
    if "index_topk" in raw:  # beyond which attention is sparse, which is not served
        told += ["--max-context", str(raw["index_topk"])]
    return raw, Config.parse(told, {})


def billions(raw: dict[str, Any], sizes: Sizes) -> float:
    embeddings = raw["vocab_size"] * raw["hidden_size"] * (1 if raw["tie_word_embeddings"] else 2)
    return float(sizes.weight_bytes / 2 + embeddings) / 1e9


def test_every_config_has_a_source() -> None:
    names = {path.stem for path in CONFIGS.glob("*.json")}
    assert names == BILLIONS.keys() | {"falcon-h1"} and len(names) >= 12
    assert all("config.json of " in (source := read(name)[0]["source"]) or "defaults of" in source for name in names)


@pytest.mark.parametrize("name", sorted(BILLIONS.keys() | {"falcon-h1"}))
def test_it_is_served_whole_and_as_large_as_it_is(name: str) -> None:
    raw, config = read(name)
    check(config)
    sizes = size(config, None)
    assert sizes.plan.left_out == "" and len(sizes.plan.layers) == len(sizes.plan.config.layers)
    assert sum(len(layers.layers) for layers in sizes.layers) == len(sizes.plan.layers)
    assert f"{raw['model_type']}, block scope, spans 0:{len(sizes.plan.layers)}, bfloat16" in report(
        sizes, config, None
    )
    if name in BILLIONS:
        assert billions(raw, sizes) == pytest.approx(BILLIONS[name], rel=0.015)
