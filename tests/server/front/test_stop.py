"""A stop at once, under prefills that have begun; and what a server that has stopped leaves behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.layer_calls import HIDDEN, make_step
from rigs.until import until

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server.app import Server

NUM_TOKENS = 30_000


async def test_stop_at_once_in_the_middle_of_a_prefill(
    make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    async with make_server(chunk_tokens=64) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
        hidden = wire.encode(np.ones((NUM_TOKENS, HIDDEN), np.float32))
        prefill = make_step(opened, kind=[pb.ROW_KIND_PREFILL], query_start_loc=[0, NUM_TOKENS], hidden=hidden)
        step = asyncio.ensure_future(stub.Step(prefill))
        while not server.runtime.scheduler.load().queued_rows:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not step.done()
        server.interrupt()
        server.interrupt()
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await step
        await asyncio.sleep(0.05)  # what the last batches called back
        assert not server.runtime.scheduler.has_failed
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_server_that_has_stopped_leaves_no_state_in_memory(make_server: Callable[..., Server]) -> None:
    server = make_server()
    async with server:
        pool = weakref.ref(server.runtime.pool)
    del server
    # A thread that was at work may hold what it had done for a moment.
    await until(lambda: gc.collect() is not None and pool() is None)
