"""A server under bad input: raw calls to it, requests to spoil, and the proof that nothing was harmed.

Knows bytes, statuses and memory; not which input is bad (the tests') nor what the server does with it.
"""

from __future__ import annotations

import contextlib
import re
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_client import AsyncClient, AsyncSequence
from deltaline_server.app import Server
from deltaline_server.tables.open_tokens import Opened

HIDDEN = 64
LAYER, ADMIN = "/deltaline.v1.LayerService/", "/deltaline.v1.AdminService/"
ADAPTER, STATE = "/deltaline.v1.AdapterService/", "/deltaline.v1.StateService/"
# Nothing of the inside may show in an error's text.
LEAK = re.compile(r"/[a-z]+/|0x[0-9a-f]{6}|Traceback|Error\b|<class|object at|deltaline_server|\.py\b")


class Target:
    """A server with a witness sequence, and raw calls to it."""

    def __init__(self, server: Server, client: AsyncClient, witness: AsyncSequence, twin: AsyncSequence) -> None:
        self.server, self.client, self.witness, self.twin = server, client, witness, twin
        self.epoch = server.runtime.table.server_epoch
        self.channel: Any = grpc.aio.insecure_channel(server.address)
        self.lines_free = server.runtime.table.num_lines - server.runtime.table.num_lines_used
        self._rng = np.random.default_rng(99)
        self._opened: list[int] = []
        table = server.runtime.table
        opens = table.open

        def noted(*arguments: Any) -> Opened:
            opened = opens(*arguments)
            self._opened += opened.handles.tolist()
            return opened

        table.open = noted  # type: ignore[method-assign, assignment]

    async def send(self, method: str, body: bytes) -> tuple[grpc.StatusCode, str, bytes, Any]:
        """Call a method with raw bytes: its code, its text, its reply, and its google.rpc.Status if there is one."""
        try:
            if method.endswith("StepStream"):
                call = self.channel.stream_stream(method)(iter([body]), timeout=120)
                reply = b"".join([message async for message in call])
            elif method.endswith("LoadAdapter"):
                reply = await self.channel.stream_unary(method)(iter([body]), timeout=120)
            else:
                reply = await self.channel.unary_unary(method)(body, timeout=120)
        except grpc.aio.AioRpcError as error:
            status = rpc_status.from_call(error)
            return error.code(), error.details() or "", b"", status
        return grpc.StatusCode.OK, "", reply, None

    async def check_unharmed(self) -> None:
        """Free lines are what they were; the witness and its untouched twin answer with the same bits."""
        table = self.server.runtime.table
        table.check_integrity()
        assert table.num_lines - table.num_lines_used == self.lines_free
        token = self._rng.standard_normal(HIDDEN).astype(np.float32)
        mine, theirs = await self.witness.decode(token), await self.twin.decode(token)
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()

    def close_strays(self) -> None:
        """Close every sequence but the witness and its twin, as its lease would."""
        table = self.server.runtime.table
        kept = {sequence.handle for sequence in (self.witness, self.twin)}
        strays, self._opened = [handle for handle in self._opened if handle not in kept], list(kept)
        table.close(table.server_epoch, np.array(strays, dtype=np.uint64))


@contextlib.asynccontextmanager
async def target_of(server: Server) -> AsyncIterator[Target]:
    """Run a server, with a witness and its twin that have a prompt behind them."""
    async with server, AsyncClient(server.address) as client:
        witness, twin = await client.open_many(2)
        prompt = np.random.default_rng(4).standard_normal((9, HIDDEN)).astype(np.float32)
        for sequence in (witness, twin):
            await sequence.prefill(prompt)
        target = Target(server, client, witness, twin)
        yield target
        await target.channel.close()


def step_request(target: Target, handles: list[int], **changes: Any) -> Any:
    """A valid first step (a prefill of two tokens) for each handle, with changes by field name."""
    count = len(handles)
    request = pb.StepRequest(
        server_epoch=target.epoch,
        sequence=handles,
        kind=[pb.ROW_KIND_PREFILL] * count,
        step=[1] * count,
        position=[0] * count,
        accepted=[-1] * count,
        query_start_loc=list(range(0, 2 * count + 1, 2)),
        hidden=wire.encode(np.ones((2 * count, HIDDEN), dtype=np.float32)),
    )
    for name, value in changes.items():
        field = getattr(request, name)
        if isinstance(value, list):
            del field[:]
            field.extend(value)
        elif hasattr(field, "CopyFrom"):
            field.CopyFrom(value)
        else:
            setattr(request, name, value)
    return request


def reason_of(status: status_pb2.Status) -> str:
    """The reason in a google.rpc.Status."""
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info) and info.domain == "deltaline"
    return str(info.reason)


@contextlib.contextmanager
def bounded_memory(limit_bytes: int) -> Iterator[None]:
    """Fail when Python and numpy ever hold more than `limit_bytes` that they allocated meanwhile."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= limit_bytes, f"{peak >> 20} MiB were allocated"
