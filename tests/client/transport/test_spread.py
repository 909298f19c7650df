"""A client's channels: which connection its calls go by, and that all of them are one client to who routes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from rigs.running_sum import FAST, Driven, FakeServer, tokens

from deltaline_client import AsyncClient, Client


class Seen(list[tuple[str, str, str]]):
    """Method, connection and affinity of each call and step that came."""

    def connections(self, method: str = "") -> set[str]:
        return {connection for name, connection, _ in self if method in name}

    def affinities(self) -> set[str]:
        return {affinity for _, _, affinity in self}


@pytest.fixture
def seen(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Seen:
    came, enter = Seen(), server.enter

    def noted(method: str, request: Any, context: Any) -> Any:
        came.append((method, context.peer(), dict(context.invocation_metadata())["deltaline-affinity"]))
        return enter(method, request, context)

    monkeypatch.setattr(server, "enter", noted)
    return came


@contextmanager
def connected(driven: Driven, server: FakeServer, **options: Any) -> Iterator[Any]:
    client = driven.make(server.address, retry=FAST, **options)
    try:
        yield client
    finally:
        driven.do(client.disconnect())


def beside(driven: Driven, slow: Callable[[], Any], server: FakeServer, others: Callable[[], list[Any]]) -> None:
    """Make calls one after the other while another one hangs."""
    if driven.make is Client:
        thread = threading.Thread(target=slow)
        thread.start()
        assert server.arrived.wait(60)
        others()
        server.released.set()
        thread.join()
        return

    async def both() -> None:
        task = asyncio.create_task(slow())
        assert await asyncio.to_thread(server.arrived.wait, 60)
        for other in others():
            await other
        server.released.set()
        await task

    driven.do(both())


def test_calls_take_turns_on_as_many_connections_and_have_one_affinity(
    driven: Driven, server: FakeServer, seen: Seen
) -> None:
    hidden = tokens(6)
    with connected(driven, server, channels=3) as client:
        sequence = driven.do(client.open())
        outputs = [driven.do(sequence.decode(row)) for row in hidden]
        np.testing.assert_array_equal(outputs, np.cumsum(hidden, axis=0))
        driven.do(sequence.close())
    assert len(seen.connections()) == len(seen.connections("Step")) == 3
    assert len(seen.affinities()) == 1


def test_a_client_has_one_connection_unless_it_asks_for_more(driven: Driven, server: FakeServer, seen: Seen) -> None:
    with connected(driven, server) as client:
        sequence = driven.do(client.open())
        for row in tokens(3):
            driven.do(sequence.decode(row))
    assert len(seen.connections()) == 1


def test_the_steps_of_a_call_stay_on_one_connection(driven: Driven, server: FakeServer, seen: Seen) -> None:
    hidden = tokens(1000)
    with connected(driven, server, channels=3) as client:
        sequence = driven.do(client.open())
        np.testing.assert_array_equal(driven.do(sequence.prefill(hidden)), np.cumsum(hidden, axis=0))
    assert sum("Step" in method for method, _, _ in seen) > 4
    assert len(seen.connections("Step")) == 1


def test_calls_go_by_connections_where_none_is_under_way(driven: Driven, server: FakeServer, seen: Seen) -> None:
    with connected(driven, server, channels=2) as client:
        driven.do(client.info())
        sequence = driven.do(client.open())
        seen.clear()
        server.hang("Step")
        beside(driven, lambda: sequence.decode(tokens(1)[0]), server, lambda: [client.load() for _ in range(5)])
        assert not seen.connections("Step") & seen.connections("GetLoad")
        seen.clear()
        for _ in range(2):  # both are free again
            driven.do(client.load())
        assert len(seen.connections()) == 2


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize("address", ["localhost", "link:/nowhere"])
@pytest.mark.parametrize("channels", [0, -1, 1.5, "2", None])
def test_a_number_that_can_not_be_is_refused(make: Any, address: str, channels: Any) -> None:
    with pytest.raises(ValueError, match=r"channels: expected 1 or more, got "):
        make(address, channels=channels)
