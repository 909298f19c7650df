"""Calls of LayerService in tests: sound steps, errors taken apart, and an engine that waits for the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.app import Server
from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.errors import DOMAIN

# What grpc.aio's client says, as INTERNAL, of some streams that end while it still writes, whatever their status.
UNTOLD = "Internal error from Core"
# How often a call is made that might be told so.
TRIES = 20
HIDDEN = 32
DECODE = pb.ROW_KIND_DECODE


class HeldEngine:
    """Stands before a server's engine and keeps its batches until they are released.

    loop: the server's, once it holds one; a test that runs elsewhere releases there.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self._submit = server.runtime.engine.submit
        self._held: list[tuple[StepBatch, Callable[[BatchResult], None]]] = []
        self._came = asyncio.Event()
        self._is_open = False
        monkeypatch.setattr(server.runtime.engine, "submit", self.submit)

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
        if self._is_open:
            self._submit(batch, on_done)
        else:
            self.loop = asyncio.get_running_loop()
            self._held.append((batch, on_done))
            self._came.set()

    async def holds_one(self) -> None:
        await asyncio.wait_for(self._came.wait(), 60)

    async def holds_two(self) -> None:
        """Wait until a further batch can't be submitted."""
        while len(self._held) < 2:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), 60)

    def release(self) -> None:
        self._is_open = True
        for batch, on_done in self._held:
            self._submit(batch, on_done)


def make_step(
    opened: pb.OpenSequencesResponse, step: int = 1, rows: slice = slice(None), **fields: Any
) -> pb.StepRequest:
    """A decode step of the opened sequences."""
    handles = opened.sequence[rows]
    count = len(handles)
    hidden = np.random.default_rng(step).standard_normal((count, HIDDEN)).astype(np.float32)
    values: dict[str, Any] = {
        "server_epoch": opened.server_epoch,
        "sequence": handles,
        "kind": [DECODE] * count,
        "step": [step] * count,
        "position": [step - 1] * count,
        "query_start_loc": range(count + 1),
        "hidden": wire.encode(hidden),
    }
    return pb.StepRequest(**(values | fields))


def detail(status: status_pb2.Status, kind: Any) -> Any:
    """The status' detail of a type, None if it has none."""
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            return message
    return None


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The google.rpc.Status that travels beside the code."""
    metadata = dict(error.trailing_metadata() or ())
    return status_pb2.Status.FromString(metadata["grpc-status-details-bin"])


def reason_of(status: status_pb2.Status) -> str:
    info = detail(status, error_details_pb2.ErrorInfo)
    assert info.domain == DOMAIN
    return str(info.reason)


async def streamed(method: Any, messages: Iterable[Any], **options: Any) -> Any:
    """What a server answers to a stream of requests. It's made again where grpc.aio's client lost that: a write that
    fails may put an error of its own in the place of the status."""
    sent = list(messages)
    for _ in range(TRIES):
        try:
            return await method(iter(sent), **options)
        except grpc.aio.AioRpcError as error:
            if error.details() != UNTOLD:
                raise
    raise AssertionError(f"{TRIES} times: {UNTOLD}")


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
