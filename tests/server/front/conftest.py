"""What the tests of services share: the server's engine, held back; states that are stood in for."""

from __future__ import annotations

import pytest
from rigs.layer_calls import HeldEngine
from rigs.watched_states import watched

from deltaline_server.app import Server

__all__ = ["watched"]


@pytest.fixture
def engine(server: Server, monkeypatch: pytest.MonkeyPatch) -> HeldEngine:
    return HeldEngine(server, monkeypatch)
