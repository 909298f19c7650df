"""What the tests of LayerService share: the server's engine, held back."""

from __future__ import annotations

import pytest
from rigs.layer_calls import HeldEngine

from deltaline_server.app import Server


@pytest.fixture
def engine(server: Server, monkeypatch: pytest.MonkeyPatch) -> HeldEngine:
    return HeldEngine(server, monkeypatch)
