"""A server of adapters only, in this process, with a folder that has one adapter, and its client."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_status import rpc_status
from rigs.adapter_cases import NEXT, adapter_config, adapter_tensors, base_weights, modules, write_adapter
from rigs.adapter_rig import Clock, FakeDevice
from rigs.layer_calls import streamed
from rigs.target import LEAK, reason_of

from deltaline.v1 import adapter_service_pb2 as pb
from deltaline.v1.adapter_service_pb2_grpc import AdapterServiceStub
from deltaline_server.adapters.adapters import Adapters
from deltaline_server.adapters.directory import MAX_CONFIG_BYTES
from deltaline_server.adapters.loader import AdapterLoader
from deltaline_server.adapters.root import AdapterRoot
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import Placement
from deltaline_server.front.adapter_service import AdapterService
from deltaline_server.front.interceptor import Interceptor
from deltaline_server.front.pace import Pace
from deltaline_server.front.trust.principals import Principals
from deltaline_server.models.config import Scope
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.weights import LayerLoader
from deltaline_server.tables.adapter_places import AdapterPlaces
from deltaline_server.tables.adapter_registry import AdapterRegistry
from deltaline_server.telemetry.metrics import Metrics

LIMIT_BYTES = 1 << 20
PLACEMENT = Placement(torch.device("cpu"), torch.float32)
PIECE = 4096


class Parts:
    """What AdapterService serves: a folder with one adapter, a registry, and a loader whose reading may be held up."""

    def __init__(self, folder: Path, has_root: bool = True) -> None:
        self.folder, self.base = folder, base_weights(NEXT)
        self.tensors = adapter_tensors(self.base, modules(NEXT))
        write_adapter(folder / "good", adapter_config(), self.tensors)
        self.places = AdapterPlaces(2, FakeDevice(2), Clock())
        self.registry = AdapterRegistry(LIMIT_BYTES, self.places)
        self.root = AdapterRoot(folder) if has_root else None
        self.allocated: list[weakref.ref[torch.Tensor]] = []
        self.before_reading: Callable[[], object] = lambda: None
        self.can_read_base = True
        self.loader = AdapterLoader(
            registry=self.registry,
            layout=AdapterLayout(NEXT, Scope.BLOCK, (0, 1), PLACEMENT),
            root=self.root,
            open_base=self.open_base,
            allocate=self.allocate,
            max_rank=8,
        )
        self.adapters = Adapters(self.registry, self.loader, ExitStack())

    @contextmanager
    def open_base(self, rank: int) -> Iterator[LayerLoader]:
        if not self.can_read_base:
            raise ModelError("model.safetensors: can't be read")
        yield LayerLoader(self.base, NEXT, (0, 1), Scope.BLOCK, PLACEMENT)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.before_reading()
        memory = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        self.allocated.append(weakref.ref(memory))
        return memory

    async def close(self) -> None:
        await self.loader.close()
        if self.root is not None:
            self.root.close()


class Rig(Parts):
    """The server and its client; `stub` and `port` are those of `running`."""

    stub: Any
    port: int

    def __init__(self, folder: Path, has_root: bool = True, **times_s: float) -> None:
        """times_s: of AdapterService."""
        super().__init__(folder, has_root)
        self.service = AdapterService(self.adapters, Pace(**times_s))

    async def load(self, name: str, pinned: bool = False) -> pb.LoadAdapterResponse:
        return await self.send([pb.LoadAdapterRequest(name=name, pinned=pinned)])

    async def upload(self, name: str, config: Any, tensors: bytes, size: int | None = None) -> pb.LoadAdapterResponse:
        text = config if isinstance(config, bytes) else json.dumps(config).encode()
        upload = pb.AdapterUpload(config=text, tensors_bytes=len(tensors) if size is None else size)
        pieces = [tensors[i : i + PIECE] for i in range(0, len(tensors), PIECE)]
        first = pb.LoadAdapterRequest(name=name, upload=upload)
        return await self.send([first, *(pb.LoadAdapterRequest(chunk=piece) for piece in pieces)])

    async def send(self, messages: list[pb.LoadAdapterRequest]) -> pb.LoadAdapterResponse:
        response: pb.LoadAdapterResponse = await streamed(self.stub.LoadAdapter, messages, timeout=60)
        return response

    async def has_all_room(self) -> bool:
        """Whether all the bytes that uploads may have are free: one that announces them, and sends none, is let in."""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.upload("a", bytes(MAX_CONFIG_BYTES), b"", LIMIT_BYTES)
        return error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def until_room(self, is_free: bool) -> None:
        """Wait until all the room is free, or some of it is taken."""
        while await self.has_all_room() is not is_free:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def check_unharmed(self) -> None:
        """Nothing is registered, no memory is taken, the places are free, and no upload is counted."""
        self.registry.check_integrity()
        assert (self.registry.num_registered, self.registry.used_bytes, self.places.num_copies) == (0, 0, 0)
        assert await self.has_all_room()


class HeldReading:
    """Stands before the reading of an adapter, in the loader's thread, until it may go on."""

    def __init__(self, rig: Rig) -> None:
        self._began, self._may_go_on = threading.Event(), threading.Event()
        rig.before_reading = self._wait

    def _wait(self) -> None:
        self._began.set()
        assert self._may_go_on.wait(60)

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self._began.wait, 60)

    def go_on(self) -> None:
        self._may_go_on.set()


@asynccontextmanager
async def serving(service: AdapterService) -> AsyncIterator[tuple[Any, int]]:
    """A server with one service: the stub of a client, and the port."""
    metrics = Metrics([pb.DESCRIPTOR.services_by_name["AdapterService"]])
    server = grpc.aio.server(interceptors=[Interceptor(metrics, Principals())])
    server.add_generic_rpc_handlers((service.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield AdapterServiceStub(channel), port
    await server.stop(None)


@asynccontextmanager
async def running(folder: Path, has_root: bool = True, **times_s: float) -> AsyncIterator[Rig]:
    """A rig that serves."""
    rig = Rig(folder, has_root, **times_s)
    async with serving(rig.service) as (rig.stub, rig.port):
        yield rig
    await rig.close()


@contextmanager
def refused(code: str, reason: str) -> Iterator[list[str]]:
    """What is inside is refused with this code and reason; the message is in the list afterwards."""
    messages: list[str] = []
    with pytest.raises(grpc.aio.AioRpcError) as error:
        yield messages
    status = rpc_status.from_call(error.value)
    assert status is not None
    assert (error.value.code().name, reason_of(status)) == (code, reason)
    assert not LEAK.search(error.value.details() or ""), error.value.details()
    messages.append(error.value.details() or "")
