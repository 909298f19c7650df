"""The client's region of shared memory while it is being made: calls beside the one that asks for it wait."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from deltaline.v1 import admin_service_pb2 as admin
from deltaline_client import AsyncClient, Client
from deltaline_client._shared_memory.regions import SharedMemory
from deltaline_client._transport.flow import Call, Sleep
from deltaline_client._transport.retry import Attempts, Retry

SIZE = 1 << 20
NONCE = b"0123456789abcdef"


class Maker:
    """Makes regions for a fake server once `released` is set; with `refuses`, none."""

    def __init__(self, server: Any) -> None:
        self.asked, self.released = threading.Event(), threading.Event()
        self.count, self.refuses = 0, False
        self._files: list[int] = []
        server.info.shared_memory_bytes = SIZE
        server.make_region = self._make

    def _make(self, request: Any, context: Any) -> admin.CreateSharedMemoryResponse:
        self.count += 1
        self.asked.set()
        self.released.wait(8)
        if self.refuses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        file = os.memfd_create("deltaline", os.MFD_ALLOW_SEALING)
        self._files.append(file)
        os.write(file, NONCE)
        os.ftruncate(file, request.size_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        name = f"/proc/{os.getpid()}/fd/{file}"
        return admin.CreateSharedMemoryResponse(region=5, name=name, size_bytes=request.size_bytes, nonce=NONCE)

    def close(self) -> None:
        self.released.set()
        for file in self._files:
            os.close(file)


@pytest.fixture
def maker(server: Any) -> Iterator[Maker]:
    made = Maker(server)
    yield made
    made.close()


def is_shared(client: Any, array: Any) -> bool:
    region = client._shared._region
    return region is not None and region[1].offset(array) is not None


@pytest.mark.parametrize("refuses", [False, True])
def test_threads_wait_for_the_region_that_one_asks_for(server: Any, maker: Maker, refuses: bool) -> None:
    maker.refuses = refuses
    with Client(server.address, shared_memory_bytes=SIZE) as client, ThreadPoolExecutor(4) as threads:
        client.info()
        calls = [threads.submit(client.empty, (3, 8)) for _ in range(4)]
        assert maker.asked.wait(5)
        with pytest.raises(TimeoutError):
            calls[0].result(0.1)
        maker.released.set()
        arrays = [call.result(5) for call in calls]
        assert [is_shared(client, array) for array in arrays] == [not refuses] * 4
        assert maker.count == 1


async def test_tasks_wait_for_the_region_that_one_asks_for(server: Any, maker: Maker) -> None:
    async with AsyncClient(server.address, shared_memory_bytes=SIZE) as client:
        await client.info()
        calls = [asyncio.create_task(client.empty((3, 8))) for _ in range(4)]
        assert await asyncio.to_thread(maker.asked.wait, 5)
        calls[0].cancel()  # the one that asks: the next asks anew
        await asyncio.sleep(0.05)
        maker.released.set()
        arrays = await asyncio.gather(*calls[1:])
        assert [is_shared(client, array) for array in arrays] == [True] * 3


def test_the_wait_ends_with_the_calls_own_timeout() -> None:
    now = [0.0]
    limits: Any = type("Limits", (), {"shared_memory_bytes": SIZE})

    def attempts() -> Attempts:
        return Attempts(Retry(clock=lambda: now[0]), 2.0)

    shared = SharedMemory(SIZE)
    asks, waits = shared.ready(limits, attempts()), shared.ready(limits, attempts())
    assert isinstance(next(asks), Call)
    for now[0] in (0.0, 1.0, 1.9):
        assert isinstance(next(waits), Sleep)
    now[0] = 2.0
    assert list(waits) == []
    asks.close()  # cancelled: the next call asks
    assert isinstance(next(shared.ready(limits, attempts())), Call)


def test_steps_of_a_call_that_waited_in_vain_go_inline(server: Any, maker: Maker) -> None:
    with Client(server.address, shared_memory_bytes=SIZE) as client, ThreadPoolExecutor(1) as threads:
        sequence = client.open()
        client.info()
        slow = threads.submit(client.empty, (3, 8))
        assert maker.asked.wait(5)
        assert sequence.decode([1.0] * 8, timeout_s=0.3).tolist() == [1.0] * 8
        assert server.requests["Step"][0].hidden.WhichOneof("payload") == "inline"
        maker.released.set()
        assert is_shared(client, slow.result(5))
