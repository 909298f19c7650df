"""AdapterService over gRPC: bad names and bad files are the caller's fault and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_status import rpc_status
from rigs.adapter_bad import BAD_FILES, BAD_NAMES
from rigs.adapter_cases import (
    NEXT,
    PREFIX,
    adapter_config,
    adapter_tensors,
    base_weights,
    modules,
    with_magnitudes,
    write_adapter,
)
from rigs.adapter_rig import Clock, FakeDevice
from rigs.target import ADAPTER, LEAK, bounded_memory, reason_of
from safetensors.torch import save

from deltaline.v1 import adapter_service_pb2 as pb
from deltaline.v1.adapter_service_pb2_grpc import AdapterServiceStub
from deltaline_server.adapters.adapters import Adapters
from deltaline_server.adapters.loader import AdapterLoader
from deltaline_server.adapters.root import AdapterRoot
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import Placement
from deltaline_server.front.adapter_service import AdapterService
from deltaline_server.front.interceptor import Interceptor
from deltaline_server.models.config import Scope
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.weights import LayerLoader
from deltaline_server.tables.adapter_places import AdapterPlaces
from deltaline_server.tables.adapter_registry import AdapterRegistry
from deltaline_server.telemetry.metrics import Metrics

LIMIT_BYTES = 1 << 20
PLACEMENT = Placement(torch.device("cpu"), torch.float32)
PIECE = 4096


class Rig:
    """A server of adapters only, with a folder that has one, and its client."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.base = folder, base_weights(NEXT)
        self.tensors = adapter_tensors(self.base, modules(NEXT))
        write_adapter(folder / "good", adapter_config(), self.tensors)
        self.places = AdapterPlaces(2, FakeDevice(2), Clock())
        self.registry = AdapterRegistry(LIMIT_BYTES, self.places)
        self.root: AdapterRoot | None = AdapterRoot(folder)
        self.allocated: list[int] = []
        self.before_reading: Callable[[], object] = lambda: None
        self.loader = AdapterLoader(
            registry=self.registry,
            layout=AdapterLayout(NEXT, Scope.BLOCK, (0, 1), PLACEMENT),
            root=self.root,
            open_base=self.open_base,
            allocate=self.allocate,
            max_rank=8,
        )
        self.service = AdapterService(Adapters(self.registry, self.loader, ExitStack()), upload_s=2.0)
        self.stub: Any = None
        self.port = 0

    @contextmanager
    def open_base(self) -> Iterator[LayerLoader]:
        yield LayerLoader(self.base, NEXT, (0, 1), Scope.BLOCK, PLACEMENT)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self.before_reading()
        self.allocated.append(num_bytes)
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    async def load(self, name: str, pinned: bool = False) -> pb.LoadAdapterResponse:
        return await self.send([pb.LoadAdapterRequest(name=name, pinned=pinned)])

    async def upload(self, name: str, config: Any, tensors: bytes, size: int | None = None) -> pb.LoadAdapterResponse:
        text = config if isinstance(config, bytes) else json.dumps(config).encode()
        upload = pb.AdapterUpload(config=text, tensors_bytes=len(tensors) if size is None else size)
        pieces = [tensors[i : i + PIECE] for i in range(0, len(tensors), PIECE)]
        first = pb.LoadAdapterRequest(name=name, upload=upload)
        return await self.send([first, *(pb.LoadAdapterRequest(chunk=piece) for piece in pieces)])

    async def send(self, messages: list[pb.LoadAdapterRequest]) -> pb.LoadAdapterResponse:
        while True:
            try:
                response: pb.LoadAdapterResponse = await self.stub.LoadAdapter(iter(messages), timeout=20)
            except grpc.aio.AioRpcError as error:
                # A write that fails may put an error of grpc.aio's own in the place of the server's status.
                if error.code() is not grpc.StatusCode.INTERNAL or error.trailing_metadata():
                    raise
            else:
                return response

    async def list(self) -> pb.ListAdaptersResponse:
        response: pb.ListAdaptersResponse = await self.stub.ListAdapters(pb.ListAdaptersRequest())
        return response


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path / "root")
    server = serve(made.service)
    made.port = server.port
    async with server as made.stub:
        yield made
    await made.loader.close()
    assert made.root is not None
    made.root.close()


class serve:
    """A server with one service; the stub of a client."""

    def __init__(self, service: AdapterService) -> None:
        metrics = Metrics([pb.DESCRIPTOR.services_by_name["AdapterService"]])
        self.server = grpc.aio.server(interceptors=[Interceptor(metrics)])
        self.server.add_generic_rpc_handlers((service.handlers(),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self) -> Any:
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        return AdapterServiceStub(self.channel)

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(None)


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


async def test_an_adapter_is_loaded_listed_and_unloaded(rig: Rig) -> None:
    response = await rig.load("good", pinned=True)
    assert not response.already_loaded
    assert response.adapter == (await rig.list()).adapters[0]
    adapter = response.adapter
    assert (adapter.name, adapter.rank, adapter.state, adapter.pinned) == ("good", 3, pb.ADAPTER_STATE_REGISTERED, True)
    assert (len(adapter.content_hash), adapter.sequences, adapter.modules_elsewhere) == (32, 0, 0)
    listed = await rig.list()
    assert (listed.used_bytes, listed.limit_bytes) == (adapter.size_bytes, LIMIT_BYTES)
    assert (listed.slots_used, listed.slots_total) == (0, 2)
    number = rig.registry.bind("good")
    assert (await rig.list()).adapters[0].sequences == 1
    with refused("FAILED_PRECONDITION", "ADAPTER_IN_USE"):
        await rig.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="good"))
    assert (await rig.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="good", drain=True))).sequences == 1
    assert (await rig.list()).adapters[0].state == pb.ADAPTER_STATE_DRAINING
    rig.registry.release(number)
    assert await rig.list() == pb.ListAdaptersResponse(limit_bytes=LIMIT_BYTES, slots_total=2)
    with refused("NOT_FOUND", "ADAPTER_UNKNOWN"):
        await rig.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="good"))


@pytest.mark.parametrize("is_dora", [False, True])
async def test_an_upload_is_what_the_folder_would_be(rig: Rig, is_dora: bool) -> None:
    tensors = with_magnitudes(rig.tensors) if is_dora else rig.tensors
    config = adapter_config(use_dora=is_dora)
    write_adapter(rig.folder / "same", config, tensors)
    theirs = await rig.load("same")
    ours = await rig.upload("mine", config, (rig.folder / "same" / "adapter_model.safetensors").read_bytes())
    assert ours.adapter.content_hash == theirs.adapter.content_hash
    weights = [rig.registry.content(rig.registry.bind(name)).weights for name in ("same", "mine")]  # type: ignore[attr-defined]
    for one, other in zip(*weights, strict=True):
        assert all(map(torch.equal, one.a, other.a)) and torch.equal(one.b, other.b)
        assert torch.equal(one.scales, other.scales)
        assert (one.factors is not None) == is_dora


async def test_loading_again_takes_no_memory_and_other_content_is_refused(rig: Rig) -> None:
    first = await rig.load("good")
    again = await rig.load("good")
    assert (again.already_loaded, again.adapter) == (True, first.adapter)
    assert len(rig.allocated) == 1
    write_adapter(rig.folder / "good", adapter_config(lora_alpha=7), rig.tensors)
    with refused("ALREADY_EXISTS", "ADAPTER_EXISTS"):
        await rig.load("good")
    await rig.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="good"))
    other = await rig.load("good")
    assert other.adapter.content_hash != first.adapter.content_hash


async def test_many_loads_of_a_name_at_once_load_it_once(rig: Rig) -> None:
    responses = await asyncio.gather(*(rig.load("good") for _ in range(8)))
    assert sorted(response.already_loaded for response in responses) == [False] + [True] * 7
    assert (len(rig.allocated), rig.registry.num_loaded) == (1, 1)
    assert 0 < rig.registry.load_s < 10
    rig.registry.check_integrity()


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:24])
async def test_bad_names(rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    opened: list[object] = []

    def spy(*args: object, **_: object) -> int:
        opened.append(args)
        return os.dup(0)

    monkeypatch.setattr(os, "open", spy)
    for call in (rig.load(name), rig.upload(name, adapter_config(), save(rig.tensors))):
        with refused("INVALID_ARGUMENT", "INVALID_ADAPTER"):
            await call
    assert opened == []
    check_unharmed(rig)


async def test_a_directory_that_is_not_there(rig: Rig) -> None:
    (rig.folder / "link").symlink_to(rig.folder / "good")
    for name in ("nothing", "link"):
        with refused("INVALID_ARGUMENT", "INVALID_ADAPTER"):
            await rig.load(name)
    check_unharmed(rig)


@pytest.mark.parametrize("case", BAD_FILES)
async def test_bad_files(rig: Rig, case: str) -> None:
    if len(BAD_FILES[case]) <= LIMIT_BYTES:
        begin_s = time.monotonic()
        with refused("INVALID_ARGUMENT", "INVALID_ADAPTER"):
            await rig.upload("bad", adapter_config(), BAD_FILES[case])
        assert time.monotonic() - begin_s < 1.0
    (rig.folder / "good" / "adapter_model.safetensors").write_bytes(BAD_FILES[case])
    begin_s = time.monotonic()
    with refused("INVALID_ARGUMENT", "INVALID_ADAPTER"):
        await rig.load("good")
    assert time.monotonic() - begin_s < 1.0
    check_unharmed(rig)


STEM = f"{PREFIX}model.layers.1.mlp.up_proj"
BAD_CONTENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rank above the limit": ({"r": 9}, {}, "r: expected an integer in 1..8"),
    "rank of a file above its config's": ({"r": 2}, {}, "expected shape"),
    "a wrong module": ({}, {f"{PREFIX}model.layers.1.mlp.side_proj.lora_A.weight": (3, 24)}, "no such module"),
    "NaN": ({}, {STEM + ".lora_A.weight": float("nan")}, "expected finite values"),
    "an infinity": ({}, {STEM + ".lora_B.weight": float("inf")}, "expected finite values"),
    "swapped sizes": ({}, {STEM + ".lora_A.weight": (24, 3)}, "expected shape"),
    "swapped factors": ({}, {STEM + ".lora_A.weight": (36, 3), STEM + ".lora_B.weight": (3, 24)}, "expected shape"),
    "a bias": ({"bias": "all"}, {}, "bias: expected 'none'"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, {}, "'modules_to_save': expected none"),
    "another base": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights: expected one that leaves"),
    "another type": ({"peft_type": "IA3"}, {}, "peft_type: expected 'LORA'"),
    "a costly pattern": ({"target_modules": "((a?){200}){200}b"}, {}, "pattern"),
    "no JSON": ({"": object}, {}, "adapter_config.json: expected JSON"),
}


@pytest.mark.parametrize("case", BAD_CONTENTS)
async def test_bad_contents(rig: Rig, case: str) -> None:
    changes, changed, message = BAD_CONTENTS[case]
    tensors = dict(rig.tensors)
    for name, value in changed.items():
        tensors[name] = torch.randn(value) if isinstance(value, tuple) else torch.full(tensors[name].shape, value)
    config: Any = b"garbage" if "" in changes else adapter_config(**changes)
    begin_s = time.monotonic()
    with refused("INVALID_ARGUMENT", "INVALID_ADAPTER") as messages:
        await rig.upload("bad", config, save(tensors))
    assert time.monotonic() - begin_s < 1.0
    assert message in messages[0]
    check_unharmed(rig)


def check_unharmed(rig: Rig) -> None:
    """Nothing is registered, no memory is taken, the slots are free, and no upload is counted."""
    rig.registry.check_integrity()
    assert (rig.registry.num_registered, rig.registry.used_bytes, rig.places.num_copies) == (0, 0, 0)
    assert rig.service._upload_bytes == 0


async def test_uploads_that_are_not_as_announced(rig: Rig) -> None:
    tensors, text = save(rig.tensors), json.dumps(adapter_config()).encode()
    upload = pb.AdapterUpload(config=text, tensors_bytes=len(tensors))
    first = pb.LoadAdapterRequest(name="a", upload=upload)
    bad = {
        "no message": [],
        "too few": [first, pb.LoadAdapterRequest(chunk=tensors[:-1])],
        "too many": [first, pb.LoadAdapterRequest(chunk=tensors), pb.LoadAdapterRequest(chunk=b"x")],
        "none": [first],
        "more than bytes": [first, pb.LoadAdapterRequest(chunk=tensors, name="a")],
        "an empty one": [first, pb.LoadAdapterRequest(chunk=tensors), pb.LoadAdapterRequest()],
        "bytes without an upload": [pb.LoadAdapterRequest(name="good", chunk=b"x")],
        "messages without an upload": [pb.LoadAdapterRequest(name="good"), pb.LoadAdapterRequest(chunk=b"x")],
    }
    for messages in bad.values():
        with refused("INVALID_ARGUMENT", "INVALID_REQUEST"):
            await rig.send(messages)
    with refused("INVALID_ARGUMENT", "INVALID_ADAPTER"):
        await rig.upload("a", b" " * ((1 << 20) + 1), tensors)
    check_unharmed(rig)
    assert (await rig.upload("a", text, tensors)).adapter.name == "a"


async def test_an_upload_that_the_server_cannot_hold_is_refused_before_it_comes(rig: Rig) -> None:
    for size in (LIMIT_BYTES + 1, 1 << 63):
        with refused("RESOURCE_EXHAUSTED", "ADAPTER_BYTES_EXHAUSTED"):
            await rig.upload("a", adapter_config(), b"x", size)
    check_unharmed(rig)


@pytest.mark.parametrize("pause_s", [30.0, 0.5], ids=["all messages", "one message"])
async def test_an_upload_that_stalls_ends_and_holds_up_nobody(rig: Rig, pause_s: float) -> None:
    rig.service._pause_s = pause_s
    begin_s = time.monotonic()

    async def messages() -> AsyncIterator[pb.LoadAdapterRequest]:
        yield pb.LoadAdapterRequest(name="a", upload=pb.AdapterUpload(config=b"{}", tensors_bytes=100))
        await asyncio.sleep(60)

    call = rig.stub.LoadAdapter(messages(), timeout=20)
    await asyncio.sleep(0.2)
    assert (await rig.load("good")).adapter.name == "good"
    with refused("DEADLINE_EXCEEDED", "UPLOAD_TIMEOUT"):
        await call
    assert rig.service._upload_bytes == 0
    assert (time.monotonic() - begin_s < 1.8) == (pause_s < 1.0)  # all messages may take 2 s


@pytest.mark.parametrize("stalls_behind", ["the first message", "a later message"])
async def test_uploads_that_stall_hold_no_more_than_they_announced(rig: Rig, stalls_behind: str) -> None:
    unknown = b"\xfa\x3f\x80\x80\xc0\x01" + bytes(3 << 20)  # a field that the service does not know
    first = pb.LoadAdapterRequest(name="a", upload=pb.AdapterUpload(config=b"{}", tensors_bytes=2)).SerializeToString()
    later = pb.LoadAdapterRequest(chunk=b"x").SerializeToString()
    bodies = [first + unknown] if stalls_behind == "the first message" else [first, later + unknown]
    calls = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        with bounded_memory(96 << 20):
            for _ in range(100):
                call: Any = channel.stream_unary(ADAPTER + "LoadAdapter")(timeout=20)
                for body in bodies:
                    await call.write(body)
                calls.append(call)
            await asyncio.sleep(0.5)
        assert rig.service._upload_bytes == 100 * 4 and not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
    assert (await rig.load("good")).adapter.name == "good"
    assert rig.service._upload_bytes == 0


async def test_the_configs_of_uploads_are_bounded_too(rig: Rig) -> None:
    config = json.dumps(adapter_config()).encode().ljust(1 << 20)
    upload = pb.AdapterUpload(config=config, tensors_bytes=LIMIT_BYTES // 2)
    stalls = [rig.stub.LoadAdapter(timeout=20) for _ in range(2)]
    for call in stalls:
        await call.write(pb.LoadAdapterRequest(name="a", upload=upload))
    done, [stalled] = await asyncio.wait(
        [asyncio.ensure_future(call) for call in stalls], return_when="FIRST_COMPLETED"
    )
    with refused("RESOURCE_EXHAUSTED", "ADAPTER_BYTES_EXHAUSTED"):
        await done.pop()
    stalled.cancel()
    await asyncio.sleep(0.1)
    assert rig.service._upload_bytes == 0
    assert (await rig.upload("a", config, save(rig.tensors))).adapter.name == "a"


async def test_a_load_that_its_client_left_is_finished_and_later_ones_go_on(rig: Rig) -> None:
    is_reading, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_reading.set()
        assert may_go_on.wait(10)

    rig.before_reading = wait
    call = rig.stub.LoadAdapter(iter([pb.LoadAdapterRequest(name="good")]), timeout=20)
    assert await asyncio.to_thread(is_reading.wait, 10)
    waits_behind = asyncio.create_task(rig.load("good"))
    assert (await rig.list()).used_bytes > 0  # the loop serves while a thread reads
    call.cancel()
    await asyncio.sleep(0.1)
    may_go_on.set()
    assert (await waits_behind).already_loaded
    rig.registry.check_integrity()


async def test_an_upload_that_its_client_left_counts_until_its_bytes_are_read(rig: Rig) -> None:
    is_reading, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_reading.set()
        assert may_go_on.wait(10)

    rig.before_reading = wait
    config, tensors = adapter_config(), save(rig.tensors)
    upload = asyncio.create_task(rig.upload("a", config, tensors))
    assert await asyncio.to_thread(is_reading.wait, 10)
    taken = rig.service._upload_bytes
    assert taken >= len(tensors)
    upload.cancel()
    await asyncio.sleep(0.1)
    assert rig.service._upload_bytes == taken
    may_go_on.set()
    async with asyncio.timeout(10):
        while rig.service._upload_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert rig.registry.num_registered == 1


async def test_nothing_stays_of_an_upload_that_its_client_left_and_that_was_refused(rig: Rig) -> None:
    is_reading, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_reading.set()
        assert may_go_on.wait(10)

    rig.before_reading = wait
    tensors = {name: tensor * float("nan") for name, tensor in rig.tensors.items()}
    upload = asyncio.create_task(rig.upload("a", adapter_config(), save(tensors)))
    assert await asyncio.to_thread(is_reading.wait, 10)
    assert rig.loader._loading is not None
    loading = weakref.ref(rig.loader._loading)
    upload.cancel()
    await asyncio.sleep(0.1)
    may_go_on.set()
    await rig.loader.close()
    await asyncio.gather(upload, return_exceptions=True)
    del upload
    await asyncio.sleep(0.1)
    assert loading() is None
    assert rig.registry.used_bytes == 0


async def test_memory_that_the_host_does_not_have(rig: Rig) -> None:
    def fail() -> None:
        raise MemoryError

    rig.before_reading = fail
    with refused("RESOURCE_EXHAUSTED", "ADAPTER_BYTES_EXHAUSTED"):
        await rig.load("good")
    check_unharmed(rig)


async def test_a_base_that_cannot_be_read_is_the_servers_fault(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ModelError("model.safetensors: can't be read")

    monkeypatch.setattr(rig.loader, "_open_base", fail)
    write_adapter(rig.folder / "good", adapter_config(use_dora=True), with_magnitudes(rig.tensors))
    with refused("INTERNAL", "BUG"):
        await rig.load("good")
    check_unharmed(rig)


async def test_a_server_without_adapters_says_so() -> None:
    async with serve(AdapterService(None)) as stub:
        calls: list[Any] = [
            stub.LoadAdapter(iter([pb.LoadAdapterRequest(name="a")])),
            stub.UnloadAdapter(pb.UnloadAdapterRequest(name="a")),
            stub.ListAdapters(pb.ListAdaptersRequest()),
        ]
        for call in calls:
            with refused("FAILED_PRECONDITION", "ADAPTERS_OFF") as messages:
                await call
            assert messages == ["this server keeps no adapters: start it with --adapter-bytes"]


async def test_a_server_without_a_folder_takes_uploads(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.loader, "_root", None)
    with refused("FAILED_PRECONDITION", "ADAPTERS_OFF") as messages:
        await rig.load("good")
    assert messages == ["this server has no folder of adapters: upload the files, or start it with --adapter-root"]
    assert (await rig.upload("good", adapter_config(), save(rig.tensors))).adapter.name == "good"
