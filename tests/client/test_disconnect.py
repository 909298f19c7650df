"""After a client's disconnect every call, also one under way, ends with the client's own error."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from deltaline_client import AsyncClient, Client, Disconnected

TOKEN = np.ones((1, 8), np.float32)


def test_calls_after_a_disconnect_raise_disconnected(driven: Any, server: Any) -> None:
    client, do = driven.make(server.address), driven.do
    sequence = do(client.open())
    do(sequence.decode(TOKEN))
    do(client.disconnect())
    for call in (client.load, client.open, sequence.close, lambda: sequence.decode(TOKEN)):
        with pytest.raises(Disconnected, match="the client was disconnected"):
            do(call())
    with pytest.raises(Disconnected):
        do(client.decode([sequence], TOKEN))
    assert not sequence.unfinished  # nothing was sent
    assert len(server.requests["Step"]) == 1
    do(client.disconnect())


def test_a_client_that_was_never_used_is_disconnected_too(driven: Any, server: Any) -> None:
    client = driven.make(server.address)
    driven.do(client.disconnect())
    with pytest.raises(Disconnected):
        driven.do(client.info())


@pytest.mark.parametrize("method", ["Step", "OpenSequences"])
def test_a_call_of_another_thread_ends(server: Any, method: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        client = Client(server.address)
        sequence = client.open()
        client.info()
        server.hang(method)
        call = threads.submit(sequence.decode, TOKEN) if method == "Step" else threads.submit(client.open)
        assert server.arrived.wait(60)
        client.disconnect()
        with pytest.raises(Disconnected):
            call.result(60)
        assert sequence.unfinished == (method == "Step")


@pytest.mark.parametrize("method", ["Step", "OpenSequences"])
async def test_a_call_of_another_task_ends(server: Any, method: str) -> None:
    client = AsyncClient(server.address)
    sequence = await client.open()
    await client.info()
    server.hang(method)
    call = asyncio.create_task(sequence.decode(TOKEN) if method == "Step" else client.open())
    assert await asyncio.to_thread(server.arrived.wait, 60)
    await client.disconnect()
    with pytest.raises(Disconnected):
        await call
    assert sequence.unfinished == (method == "Step")


async def test_a_task_that_is_cancelled_itself_ends_as_cancelled(server: Any) -> None:
    client = AsyncClient(server.address)
    await client.info()
    server.hang("OpenSequences")
    call = asyncio.create_task(client.open())
    assert await asyncio.to_thread(server.arrived.wait, 60)
    call.cancel()
    await client.disconnect()
    with pytest.raises(asyncio.CancelledError):
        await call
