"""What the tests of LayerService share: its stub, and the server's engine held back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from rigs.layer_calls import HeldEngine

from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server.app import Server


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return layer_service_pb2_grpc.LayerServiceStub(channel)


@pytest.fixture
def engine(server: Server, monkeypatch: pytest.MonkeyPatch) -> HeldEngine:
    return HeldEngine(server, monkeypatch)
