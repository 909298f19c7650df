"""More of the small servers, to which sequences are moved, and clients that may go there or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rigs.running_sum import FAST, Driven, FakeServer, running

from deltaline_client import Retry


@pytest.fixture
def other() -> Iterator[FakeServer]:
    with running(78) as fake:
        yield fake


@pytest.fixture
def third() -> Iterator[FakeServer]:
    with running(79) as fake:
        yield fake


@pytest.fixture
def clients(driven: Driven, server: FakeServer) -> Iterator[Callable[..., Any]]:
    """Makes clients of one kind, of the first server, that may follow to others."""
    made: list[Any] = []

    def make(*servers: FakeServer, retry: Retry = FAST) -> Any:
        made.append(driven.make(server.address, retry=retry, servers=[one.address for one in servers]))
        return made[-1]

    yield make
    for client in made:
        driven.do(client.disconnect())
