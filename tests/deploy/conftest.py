"""A live server, for what deploy/ says of its metrics."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rigs.adapter_cases import base_weights
from rigs.small_models import GATED_DELTA_NET
from safetensors.torch import save_file

from deltaline_server.app import Server
from deltaline_server.config import Config
from deltaline_server.models.config import ModelConfig

MODEL = GATED_DELTA_NET | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Server]:
    """A server of a small checkpoint, on the CPU, with room for adapters and with metrics."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    save_file(base_weights(ModelConfig.from_mapping(MODEL), layers=1).tensors, model / "model.safetensors")
    config = Config(
        model=str(model),
        device="cpu",
        dtype="float32",
        max_sequences=16,
        port=0,
        metrics_port=0,
        adapter_bytes=1 << 20,
        host_state_bytes=1 << 20,
    )
    async with Server(config) as server:
        yield server
