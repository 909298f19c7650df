"""Uploads of adapters: as announced, within bounds of bytes and time, and gone when they are over or left."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from rigs.adapter_cases import adapter_config
from rigs.adapter_server import LIMIT_BYTES, HeldReading, Rig, refused, running
from rigs.principals import as_anonymous
from rigs.target import ADAPTER
from safetensors.torch import save

from deltaline.sizes import spelled_bytes
from deltaline.v1 import adapter_service_pb2 as pb
from deltaline_server.adapters.directory import MAX_CONFIG_BYTES


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(tmp_path) as rig:
        yield rig


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
        await rig.upload("a", b" " * (MAX_CONFIG_BYTES + 1), tensors)
    await rig.check_unharmed()
    assert (await rig.upload("a", text, tensors)).adapter.name == "a"


async def test_an_upload_that_the_server_cannot_hold_is_refused_before_it_comes(rig: Rig) -> None:
    for size in (LIMIT_BYTES + 1, 1 << 63):
        with refused("RESOURCE_EXHAUSTED", "ADAPTER_BYTES_EXHAUSTED"):
            await rig.upload("a", adapter_config(), b"x", size)
    await rig.check_unharmed()


@pytest.mark.parametrize("times_s", [{"whole_s": 2.0}, {"pause_s": 2.0}], ids=["all messages", "one message"])
async def test_an_upload_that_stalls_ends_and_holds_up_nobody(tmp_path: Path, times_s: dict[str, Any]) -> None:
    async with running(tmp_path, **({"whole_s": 600.0, "pause_s": 600.0} | times_s)) as rig:
        stalled = rig.stub.LoadAdapter(timeout=60)
        upload = pb.AdapterUpload(config=b"{}", tensors_bytes=100)
        await stalled.write(pb.LoadAdapterRequest(name="a", upload=upload))
        assert (await rig.load("good")).adapter.name == "good"
        with refused("DEADLINE_EXCEEDED", "UPLOAD_TIMEOUT"):
            await stalled
        await rig.until_room(is_free=True)


class Message:
    """A message of which is seen whether anybody still has it."""

    alive = 0

    def __init__(self, message: pb.LoadAdapterRequest) -> None:
        self._message = message
        Message.alive += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def __del__(self) -> None:
        Message.alive -= 1


@pytest.mark.parametrize("num_chunks", [0, 2], ids=["behind the first message", "behind a later message"])
async def test_an_upload_that_stalls_holds_none_of_its_messages(rig: Rig, num_chunks: int) -> None:
    """They may be much larger than what was announced: with fields that the service does not know."""
    has_stalled = asyncio.Event()

    async def messages() -> AsyncIterator[Any]:
        yield Message(pb.LoadAdapterRequest(name="a", upload=pb.AdapterUpload(config=b"{}", tensors_bytes=9)))
        for _ in range(num_chunks):
            yield Message(pb.LoadAdapterRequest(chunk=b"x"))
        has_stalled.set()
        await asyncio.Event().wait()

    as_anonymous()
    context: Any = None
    call = asyncio.create_task(rig.service.load_adapter(messages(), context))
    await has_stalled.wait()
    assert Message.alive == 0
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert await rig.has_all_room()


async def test_a_stream_that_stalls_holds_no_bytes_of_its_messages(rig: Rig) -> None:
    unknown = b"\xfa\x3f\x80\x80\xc0\x01" + bytes(3 << 20)  # a field that the service does not know
    first = pb.LoadAdapterRequest(name="a", upload=pb.AdapterUpload(config=b"{}", tensors_bytes=2))
    body = first.SerializeToString() + unknown
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        call: Any = channel.stream_unary(ADAPTER + "LoadAdapter")(timeout=60)
        tracemalloc.start()
        try:
            await call.write(body)
            await rig.until_room(is_free=False)
            held = [trace.size for trace in tracemalloc.take_snapshot().traces if trace.size >= len(body)]
        finally:
            tracemalloc.stop()
        assert held == [] and not call.done()
        call.cancel()
    await rig.until_room(is_free=True)


async def test_the_configs_of_uploads_are_bounded_too(rig: Rig) -> None:
    config = json.dumps(adapter_config()).encode().ljust(MAX_CONFIG_BYTES)
    upload = pb.AdapterUpload(config=config, tensors_bytes=LIMIT_BYTES // 2)
    stalls = [rig.stub.LoadAdapter(timeout=60) for _ in range(2)]
    for call in stalls:
        await call.write(pb.LoadAdapterRequest(name="a", upload=upload))
    done, [stalled] = await asyncio.wait(
        [asyncio.ensure_future(call) for call in stalls], return_when="FIRST_COMPLETED"
    )
    with refused("RESOURCE_EXHAUSTED", "ADAPTER_BYTES_EXHAUSTED") as told:
        await done.pop()
    left, all_bytes = spelled_bytes(LIMIT_BYTES - LIMIT_BYTES // 2), spelled_bytes(LIMIT_BYTES + MAX_CONFIG_BYTES)
    assert f"and {left} of {all_bytes} can be had for uploads: try again later" in told[0]
    stalled.cancel()
    await rig.until_room(is_free=True)
    assert (await rig.upload("a", config, save(rig.tensors))).adapter.name == "a"


# -- left by their clients ---------------------------------------------------------------------------------------------


async def test_a_load_that_its_client_left_is_finished_and_later_ones_go_on(rig: Rig) -> None:
    reading = HeldReading(rig)
    call = rig.stub.LoadAdapter(iter([pb.LoadAdapterRequest(name="good")]), timeout=60)
    await reading.has_begun()
    waits_behind = asyncio.create_task(rig.load("good"))
    listed = await rig.stub.ListAdapters(pb.ListAdaptersRequest())
    assert listed.used_bytes > 0  # the loop serves while a thread reads
    call.cancel()
    await asyncio.sleep(0.1)
    reading.go_on()
    assert (await waits_behind).already_loaded
    rig.registry.check_integrity()


async def test_an_upload_that_its_client_left_counts_until_its_bytes_are_read(rig: Rig) -> None:
    reading = HeldReading(rig)
    upload = asyncio.create_task(rig.upload("a", adapter_config(), save(rig.tensors)))
    await reading.has_begun()
    assert not await rig.has_all_room()
    upload.cancel()
    await asyncio.sleep(0.1)
    assert not await rig.has_all_room()
    reading.go_on()
    await rig.until_room(is_free=True)
    assert rig.registry.num_registered == 1


async def test_nothing_stays_of_an_upload_that_its_client_left_and_that_was_refused(rig: Rig) -> None:
    reading = HeldReading(rig)
    tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in rig.tensors.items()}
    upload = asyncio.create_task(rig.upload("a", adapter_config(), save(tensors)))
    await reading.has_begun()
    upload.cancel()
    await asyncio.sleep(0.1)
    reading.go_on()
    await rig.until_room(is_free=True)
    await asyncio.gather(upload, return_exceptions=True)
    del upload
    [memory] = rig.allocated
    while memory() is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await rig.check_unharmed()
