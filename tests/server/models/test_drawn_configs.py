"""Configs drawn at random are served as transformers computes them, or refused by the key that is not served."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.drawn_configs import Draw, draw, lie
from rigs.drawn_keys import Raw
from rigs.drawn_weights import draw_weights
from rigs.layer_oracle import Oracle, WithEnds, assert_same_life

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.models.model import ModelOptions, check_model

pytestmark = pytest.mark.usefixtures("no_gradients")

VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "projection_intermediate_size": 32}
NESTED = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe", "lfm2": "lfm2_vl"}
NESTED |= {"glm5_next_text": "glm5_next"}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
DRAWN, SWEPT = range(36), range(36, 1200)


@pytest.mark.parametrize("seed", [*DRAWN, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in SWEPT)])
def test_a_drawn_config_is_served_or_refused_by_name(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it is the oracle")
    drawn = draw(seed)
    if drawn.refused is not None:
        assert_refused(tmp_path, drawn)
        return
    has_streams = "hc_mult" in drawn.raw
    oracle = (WithEnds if has_streams else Oracle)(write(tmp_path, drawn.raw, seed), tmp_path)
    torch.manual_seed(seed)
    assert_same_life(oracle, "cpu", range(len(oracle.model.base_model.layers)))


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(8, 300))])
def test_what_is_drawn_to_lie_is_served_or_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    """Whatever stands where something else was: no other error, and nothing large is made of it."""
    rng, path = random.Random(seed), tmp_path / "config.json"
    refused = 0
    for i in range(100):
        path.write_text(json.dumps(lie(rng, draw(100 * seed + i).raw)))
        try:
            check_model(ModelOptions(torch.device("cpu"), random_init=path))
        except ModelError as error:
            refused += 1
            message = str(error)
            assert "expected" in message and "\n" not in message and len(message) < 600, message
    assert 20 < refused < 100


def write(folder: Path, raw: Raw, seed: int) -> Any:
    """Write a checkpoint whose config.json says this, in these words; return the language model of transformers."""
    import transformers

    told = copy.deepcopy(raw)
    model_type = told.pop("model_type")
    if model_type == "glm5_next_text":  # which is written with what sees alone
        config = transformers.Glm5NextConfig(text_config=told, vision_config=VISION)
        makes = transformers.AutoModelForImageTextToText
    else:
        config = transformers.AutoConfig.for_model(model_type, **told)
        makes = transformers.AutoModelForCausalLM
    model: Any = makes.from_config(config, **EAGER)
    draw_weights(model, model_type, seed)
    model.eval().save_pretrained(folder)
    # Beside what sees, the same config is nested, or stands beside that of what sees.
    outer = NESTED.get(raw["model_type"]) if seed % 5 < 2 else None
    whole = raw if outer is None else {"model_type": outer, "text_config": raw}
    if model_type == "glm5_next_text" and seed % 5 == 3:
        whole = raw | {"model_type": "glm5_next"}
    (folder / "config.json").write_text(json.dumps(whole))
    return model.model.language_model if model_type == "glm5_next_text" else model


def assert_refused(folder: Path, drawn: Draw) -> None:
    """Fail unless the config is refused in one line that names its key."""
    path = folder / "config.json"
    path.write_text(json.dumps(drawn.raw))
    with pytest.raises(ModelError) as refused:
        check_model(ModelOptions(torch.device("cpu"), random_init=path))
    assert drawn.refused is not None
    assert f"{drawn.refused}: expected" in str(refused.value) and "\n" not in str(refused.value)
