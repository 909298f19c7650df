"""What the tests of the server share: a small server with random weights on the CPU, in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from rigs.small_models import GATED_DELTA_NET

from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server.app import Server
from deltaline_server.config import Config

SMALL_MODEL = GATED_DELTA_NET | {"hidden_size": 32}


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    """The path of a small model's config."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL_MODEL))
    return str(path)


@pytest.fixture
def make_server(model_file: str) -> Callable[..., Server]:
    """A function that makes a server; its arguments are options of Config."""

    def make(**changes: Any) -> Server:
        values: dict[str, Any] = {"random_init": model_file, "device": "cpu", "port": 0, "metrics_port": -1}
        return Server(Config(**(values | {"max_sequences": 8, "max_draft_tokens": 4} | changes)))

    return make


@pytest.fixture
async def server(make_server: Callable[..., Server]) -> AsyncIterator[Server]:
    async with make_server() as server:
        yield server


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """`log.configure` changes the process; leave it as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return layer_service_pb2_grpc.LayerServiceStub(channel)
