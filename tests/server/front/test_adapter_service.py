"""AdapterService over gRPC: what is loaded and listed; bad input is the caller's fault and leaves nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from rigs.adapter_bad import BAD_FILES, BAD_NAMES
from rigs.adapter_cases import adapter_config, with_magnitudes, write_adapter
from rigs.adapter_server import LIMIT_BYTES, Rig, refused, running, serving
from rigs.layer_calls import streamed
from safetensors.torch import save

from deltaline.v1 import adapter_service_pb2 as pb
from deltaline_server.front.adapter_service import AdapterService


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(tmp_path) as rig:
        yield rig


async def listed(rig: Rig) -> pb.ListAdaptersResponse:
    response: pb.ListAdaptersResponse = await rig.stub.ListAdapters(pb.ListAdaptersRequest())
    return response


async def test_an_adapter_is_loaded_listed_and_unloaded(rig: Rig) -> None:
    response = await rig.load("good", pinned=True)
    assert not response.already_loaded
    found = await listed(rig)
    assert response.adapter == found.adapters[0]
    adapter = response.adapter
    assert (adapter.name, adapter.rank, adapter.state, adapter.pinned) == ("good", 3, pb.ADAPTER_STATE_REGISTERED, True)
    assert (len(adapter.content_hash), adapter.sequences, adapter.modules_elsewhere) == (32, 0, 0)
    assert (found.used_bytes, found.limit_bytes) == (adapter.size_bytes, LIMIT_BYTES)
    assert (found.slots_used, found.slots_total) == (0, 2)
    number = rig.registry.bind("good")
    assert (await listed(rig)).adapters[0].sequences == 1
    with refused("FAILED_PRECONDITION", "ADAPTER_IN_USE"):
        await rig.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="good"))
    assert (await rig.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="good", drain=True))).sequences == 1
    assert (await listed(rig)).adapters[0].state == pb.ADAPTER_STATE_DRAINING
    rig.registry.release(number)
    assert await listed(rig) == pb.ListAdaptersResponse(limit_bytes=LIMIT_BYTES, slots_total=2)
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


async def test_many_loads_of_a_name_at_once_load_it_once(rig: Rig) -> None:
    responses = await asyncio.gather(*(rig.load("good") for _ in range(8)))
    assert sorted(response.already_loaded for response in responses) == [False] + [True] * 7
    assert len({response.adapter.SerializeToString() for response in responses}) == 1
    assert (len(rig.allocated), rig.registry.num_loaded) == (1, 1) and rig.registry.load_s > 0
    rig.registry.check_integrity()


async def test_bad_names(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    def spy(*args: object, **_: object) -> int:
        opened.append(args)
        return os.dup(0)

    tensors = save(rig.tensors)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", spy)
        for name in BAD_NAMES:
            for call in (rig.load(name), rig.upload(name, adapter_config(), tensors)):
                with refused("INVALID_ARGUMENT", "INVALID_ADAPTER"):
                    await call
    assert opened == []
    await rig.check_unharmed()


async def test_a_file_that_is_no_adapter(rig: Rig) -> None:
    for config, tensors in ((adapter_config(), BAD_FILES["a pickle"]), (b"garbage", save(rig.tensors))):
        with refused("INVALID_ARGUMENT", "INVALID_ADAPTER"):
            await rig.upload("bad", config, tensors)
    (rig.folder / "good" / "adapter_model.safetensors").write_bytes(BAD_FILES["a pickle"])
    with refused("INVALID_ARGUMENT", "INVALID_ADAPTER"):
        await rig.load("good")
    await rig.check_unharmed()


async def test_memory_that_the_host_does_not_have(rig: Rig) -> None:
    def fail() -> None:
        raise MemoryError

    rig.before_reading = fail
    with refused("RESOURCE_EXHAUSTED", "ADAPTER_BYTES_EXHAUSTED"):
        await rig.load("good")
    await rig.check_unharmed()


async def test_a_base_that_cannot_be_read_is_the_servers_fault(rig: Rig) -> None:
    rig.can_read_base = False
    write_adapter(rig.folder / "good", adapter_config(use_dora=True), with_magnitudes(rig.tensors))
    with refused("INTERNAL", "BUG"):
        await rig.load("good")
    await rig.check_unharmed()


async def test_a_server_without_a_folder_takes_uploads(tmp_path: Path) -> None:
    async with running(tmp_path, has_root=False) as rig:
        with refused("FAILED_PRECONDITION", "ADAPTERS_OFF") as messages:
            await rig.load("good")
        [message] = messages
        assert message.startswith("this server has no folder of adapters: upload ") and "--from DIR" in message
        assert (await rig.upload("good", adapter_config(), save(rig.tensors))).adapter.name == "good"


async def test_a_server_without_adapters_says_so() -> None:
    async with serving(AdapterService(None)) as (stub, _):
        for call in (
            streamed(stub.LoadAdapter, [pb.LoadAdapterRequest(name="a")]),
            stub.UnloadAdapter(pb.UnloadAdapterRequest(name="a")),
            stub.ListAdapters(pb.ListAdaptersRequest()),
        ):
            with refused("FAILED_PRECONDITION", "ADAPTERS_OFF"):
                await call
