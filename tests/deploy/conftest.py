"""A live server under all kinds of steps, for what deploy/ says of its metrics."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from rigs.adapter_cases import base_weights
from rigs.dashboards import ROOT
from rigs.small_models import GATED_DELTA_NET, HIDDEN
from safetensors.torch import save_file

from deltaline_client import AsyncClient, Row
from deltaline_server.app import Server
from deltaline_server.config import Config
from deltaline_server.models.config import ModelConfig

MODEL = GATED_DELTA_NET | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
Demo = Callable[[float], Awaitable[None]]


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
    )
    async with Server(config) as server:
        yield server


@pytest.fixture
async def demo(live: Server, tmp_path: Path) -> Demo:
    """A function that keeps the server at work for some seconds: prefills, decodes, verifies and an adapter."""

    async def run(seconds: float) -> None:
        adapter = tmp_path / "french"
        make = [sys.executable, "-P", str(ROOT / "examples" / "make_adapter.py"), str(live.config.model), str(adapter)]
        await asyncio.to_thread(subprocess.run, make, check=True, capture_output=True)
        rng = np.random.default_rng(1)
        until_s = asyncio.get_running_loop().time() + seconds
        async with AsyncClient(live.address) as client:
            await client.adapters.load("french", adapter)
            sequences = [await client.open(), await client.open(), await client.open(adapter="french")]
            while asyncio.get_running_loop().time() < until_s:
                for row, length in ((Row.prefill, 17), (Row.decode, 1), (Row.verify, 3)):
                    hidden = rng.standard_normal((3, length, HIDDEN), dtype=np.float32)
                    await client.step([row(one, hidden[i]) for i, one in enumerate(sequences)])
                for one in sequences:
                    await one.commit(2)
                await asyncio.sleep(0.05)
            for one in sequences:
                await one.close()

    return run
