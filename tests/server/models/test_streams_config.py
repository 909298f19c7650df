"""What a config says of residual streams, and which ends of a model may be asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.small_models import GATED_DELTA_NET

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.streams import StreamConfig, StreamEnds
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.model import ModelOptions, check_model, load_model

TEXT = GATED_DELTA_NET


def test_what_a_config_says_of_streams() -> None:
    assert ModelConfig.from_mapping(TEXT).streams is None
    assert ModelConfig.from_mapping(TEXT | {"hc_mult": 2}).streams == StreamConfig(2, 20, 1e-6)
    keys = {"hc_mult": 8, "hc_sinkhorn_iters": 3, "hc_eps": 1e-5}
    assert ModelConfig.from_mapping(TEXT | keys).streams == StreamConfig(8, 3, 1e-5)
    nested = {"model_type": "qwen3_5", "text_config": TEXT | keys, "hc_mult": 3}
    assert ModelConfig.from_mapping(nested).streams == StreamConfig(8, 3, 1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hc_mult": 0}, r"hc_mult: expected an integer in 1\.\.8, got 0"),
        ({"hc_mult": 9}, r"hc_mult: expected an integer in 1\.\.8, got 9"),
        ({"hc_mult": 2.0}, "hc_mult: expected an integer"),
        ({"hc_mult": 2, "hc_sinkhorn_iters": 0}, r"hc_sinkhorn_iters: expected an integer in 1\.\.1000, got 0"),
        ({"hc_mult": 2, "hc_eps": 0}, "hc_eps: expected a positive number that fp32 holds, got 0"),
    ],
)
def test_what_a_config_may_not_say_of_streams(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_mapping(TEXT | keys)


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ({}, {"stream_ends": StreamEnds.BOTH}, "--stream-ends: expected none, as .* no residual streams, got both"),
        (
            {"hc_mult": 2},
            {"stream_ends": StreamEnds.HEAD, "scope": Scope.MIXER},
            "--stream-ends: expected none, as .* in mixer scope, there are no residual streams, got head",
        ),
        (
            {"hc_mult": 2},
            {"stream_ends": StreamEnds.EXPAND, "layers": range(1, 2)},
            "--stream-ends: expected a span that begins with layer 0 to expand, got spans that begin with 1",
        ),
        (
            {"hc_mult": 2},
            {"stream_ends": StreamEnds.BOTH, "layers": range(0, 1)},
            "--stream-ends: expected a span that ends with layer 1 for the head, got spans that end with 0",
        ),
    ],
    ids=["plain", "mixer", "not-first", "not-last"],
)
@pytest.mark.parametrize("use", [load_model, check_model])
def test_ends_that_no_span_has_are_refused(
    tmp_path: Path, use: Callable[..., object], keys: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TEXT | keys))
    with pytest.raises(ModelError, match=message):
        use(ModelOptions(torch.device("cpu"), random_init=config, **changes))
