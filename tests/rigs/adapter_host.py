"""A server of adapters in a thread, for tests of clients: the real AdapterService over a folder, and what goes wrong.

Its device is the fake of `adapter_rig`; of AdminService it has GetServerInfo alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import torch
from rigs.adapter_cases import adapter_config, write_adapter
from rigs.adapter_server import LIMIT_BYTES as LIMIT_BYTES
from rigs.adapter_server import Parts

from deltaline.v1 import adapter_service_pb2 as pb
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import tensor_pb2
from deltaline_server.adapters.adapters import Adapters
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front.adapter_service import AdapterService
from deltaline_server.front.interceptor import Context, Interceptor
from deltaline_server.front.trust.principals import Principals
from deltaline_server.telemetry.metrics import Metrics

SERVICES = [pb.DESCRIPTOR.services_by_name["AdapterService"], admin.DESCRIPTOR.services_by_name["AdminService"]]
# Small, so that small files go in several pieces.
INLINE_LIMIT_BYTES = 4096


class Faulty(AdapterService):
    """The service; answers of calls are lost as queued in `lost`, by method, after the call took effect."""

    def __init__(self, adapters: Adapters | None) -> None:
        super().__init__(adapters)
        self.lost: deque[str] = deque()
        self.calls: list[tuple[str, Any]] = []
        self.before_load: Callable[[], object] = lambda: None
        # Whether chunks of uploads are read and dropped, and the upload then refused.
        self.takes_no_bytes = False

    async def load_adapter(self, messages: AsyncIterator[pb.LoadAdapterRequest], context: Context) -> bytes:
        sent: list[pb.LoadAdapterRequest] = []
        self.calls.append(("LoadAdapter", sent))
        self.before_load()
        if self.takes_no_bytes:
            async for _ in messages:
                pass
            raise RequestError(Reason.INVALID_ADAPTER, "nothing was kept")

        async def noted() -> AsyncIterator[pb.LoadAdapterRequest]:
            async for message in messages:
                sent.append(message)
                yield message

        return await self._answer("LoadAdapter", await super().load_adapter(noted(), context), context)

    async def unload_adapter(self, message: pb.UnloadAdapterRequest, context: Context) -> bytes:
        self.calls.append(("UnloadAdapter", message))
        return await self._answer("UnloadAdapter", await super().unload_adapter(message, context), context)

    async def _answer(self, method: str, answer: bytes, context: Context) -> bytes:
        if self.lost and self.lost[0] == method:
            self.lost.popleft()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        return answer


class AdapterHost:
    """The server. What is in it belongs to its thread: `do` looks at it and changes it there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = admin.GetServerInfoResponse(
            server_epoch=77,
            scope=admin.SCOPE_BLOCK,
            hidden_size=24,
            dtype=tensor_pb2.DATA_TYPE_FLOAT32,
            state_dtype=tensor_pb2.DATA_TYPE_FLOAT32,
            inline_limit_bytes=INLINE_LIMIT_BYTES,
        )
        self._parts = Parts(folder)
        self.tensors, self.registry = self._parts.tensors, self._parts.registry
        self.directory = folder / "good"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.do(self._start)

    def write(self, name: str, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
        """Write an adapter into the folder; `changes` are those of its config."""
        return write_adapter(self.folder / name, adapter_config(**changes), tensors or self.tensors)

    def do(self, what: Callable[[], Any]) -> Any:
        """Call it in the server's thread; a coroutine is awaited."""

        async def call() -> Any:
            result = what()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(60)

    async def _start(self) -> None:
        self.service = Faulty(self._parts.adapters)
        self._server = grpc.aio.server(interceptors=[Interceptor(Metrics(SERVICES), Principals())])
        self._server.add_generic_rpc_handlers((self.service.handlers(), _info_handlers(self.info)))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    def stop(self) -> None:
        """Stop the server and its thread."""
        self.do(lambda: self._server.stop(None))
        self.do(self._parts.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _info_handlers(answer: admin.GetServerInfoResponse) -> grpc.GenericRpcHandler:
    async def info(message: bytes, context: Context) -> bytes:
        return answer.SerializeToString()

    handlers: dict[str, Any] = {"GetServerInfo": grpc.unary_unary_rpc_method_handler(info)}
    return grpc.method_handlers_generic_handler("deltaline.v1.AdminService", handlers)
