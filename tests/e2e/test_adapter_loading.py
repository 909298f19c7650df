"""Both clients load, list and unload adapters of a real AdapterService: what is sent, sent again, and refused."""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rigs.adapter_host import INLINE_LIMIT_BYTES, LIMIT_BYTES, AdapterHost
from rigs.killing_proxy import KillingProxy

from deltaline_client import (
    AdapterBytesExhausted,
    AdapterExists,
    AdapterInUse,
    AdapterList,
    AdapterState,
    AdapterUnknown,
    AsyncClient,
    Client,
    DeadlineExceeded,
    Disconnected,
    InvalidAdapter,
    LoadedAdapter,
    Retry,
)

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[AdapterHost]:
    made = AdapterHost(tmp_path / "root")
    yield made
    made.stop()


@dataclass
class Driven:
    """The adapters of a client of either kind; `do` finishes what their methods return."""

    adapters: Any
    do: Callable[[Any], Any]

    def load(self, *args: Any, **options: Any) -> LoadedAdapter:
        loaded: LoadedAdapter = self.do(self.adapters.load(*args, **options))
        return loaded

    def unload(self, name: str, **options: Any) -> int:
        count: int = self.do(self.adapters.unload(name, **options))
        return count

    def list(self) -> AdapterList:
        listed: AdapterList = self.do(self.adapters.list())
        return listed


def fast(**options: Any) -> Retry:
    return Retry(initial_backoff_s=0.001, max_backoff_s=0.01, generator=random.Random(0), **options)


@pytest.fixture(params=["sync", "async"])
def driven(request: pytest.FixtureRequest, host: AdapterHost) -> Iterator[Driven]:
    with drive(request.param, host.address, fast()) as made:
        yield made


@contextmanager
def drive(kind: str, address: str, retry: Retry) -> Iterator[Driven]:
    if kind == "sync":
        with Client(address, timeout=120.0, retry=retry) as blocking:
            yield Driven(blocking.adapters, lambda result: result)
        return
    loop = asyncio.new_event_loop()
    client = AsyncClient(address, timeout=120.0, retry=retry)
    yield Driven(client.adapters, lambda result: loop.run_until_complete(result))
    loop.run_until_complete(client.disconnect())
    loop.close()


def files(directory: Path) -> tuple[bytes, bytes]:
    return (directory / CONFIG).read_bytes(), (directory / TENSORS).read_bytes()


def test_an_adapter_of_the_servers_folder(host: AdapterHost, driven: Driven) -> None:
    loaded = driven.load("good", pinned=True)
    adapter, listed = loaded.adapter, driven.list()
    assert not loaded.already_loaded
    assert (adapter.name, adapter.rank, adapter.state, adapter.pinned) == ("good", 3, AdapterState.REGISTERED, True)
    assert (len(adapter.content_hash), adapter.sequences, adapter.modules_elsewhere) == (32, 0, 0)
    assert listed == AdapterList((adapter,), adapter.size_bytes, LIMIT_BYTES, 0, 2)
    assert driven.unload("good") == 0
    assert driven.list() == AdapterList((), 0, LIMIT_BYTES, 0, 2)
    with pytest.raises(AdapterUnknown):
        driven.unload("good")


def test_a_directory_of_this_machine_is_sent_in_pieces(host: AdapterHost, driven: Driven, tmp_path: Path) -> None:
    theirs = driven.load("good").adapter
    ours = (host.folder / "good").rename(tmp_path / "ours")
    told: list[tuple[int, int]] = []
    sent = driven.load("mine", ours, progress=lambda done, total: told.append((done, total))).adapter
    assert (sent.content_hash, sent.name, sent.pinned) == (theirs.content_hash, "mine", False)
    config, tensors = files(ours)
    _, messages = host.service.calls[-1]
    assert messages[0].upload.config == config
    assert b"".join(message.chunk for message in messages) == tensors
    assert len(messages) > 3 and all(len(message.chunk) <= INLINE_LIMIT_BYTES for message in messages)
    assert told[0] == (0, len(tensors)) and told[-1] == (len(tensors), len(tensors))
    assert [done for done, _ in told] == sorted(done for done, _ in told) and len(told) == len(messages)


def test_files_in_memory_are_sent(driven: Driven, host: AdapterHost) -> None:
    config, tensors = files(host.directory)
    loaded = driven.load("mine", config=config, tensors=memoryview(tensors), pinned=True)
    assert loaded.adapter.pinned
    assert driven.load("good").adapter.content_hash == loaded.adapter.content_hash


def test_a_load_counts_once_and_other_content_is_refused(driven: Driven, host: AdapterHost) -> None:
    first = driven.load("good", pinned=True).adapter
    again = driven.load("good", host.directory)
    assert again.already_loaded and again.adapter.content_hash == first.content_hash
    assert not again.adapter.pinned
    host.write("good", lora_alpha=7)
    with pytest.raises(AdapterExists):
        driven.load("good")
    assert len(driven.list().adapters) == 1


def test_a_load_is_sent_again_when_its_answer_is_lost(driven: Driven, host: AdapterHost) -> None:
    told: list[int] = []
    host.service.lost.extend(["LoadAdapter"] * 2)
    loaded = driven.load("mine", host.directory, progress=lambda done, _: told.append(done))
    assert loaded.already_loaded and loaded.adapter.name == "mine"
    sent = [messages for method, messages in host.service.calls if method == "LoadAdapter"]
    assert len(sent) == 3 and sent[0] == sent[1] == sent[2]
    assert told.count(0) == 3
    assert host.registry.num_loaded == 1


def test_an_unload_is_sent_again_when_its_answer_is_lost(driven: Driven, host: AdapterHost) -> None:
    driven.load("good")
    host.service.lost.append("UnloadAdapter")
    assert driven.unload("good") == 0
    driven.load("good")
    host.do(lambda: host.registry.bind("good", 3))
    host.service.lost.append("UnloadAdapter")
    assert driven.unload("good", drain=True) == 3
    assert [one.state for one in driven.list().adapters] == [AdapterState.DRAINING]


def test_an_adapter_in_use_is_not_waited_for(driven: Driven, host: AdapterHost) -> None:
    driven.load("good")
    number = host.do(lambda: host.registry.bind("good", 2))
    with pytest.raises(AdapterInUse) as refused:
        driven.unload("good")
    assert [method for method, _ in host.service.calls] == ["LoadAdapter", "UnloadAdapter"]
    assert refused.value.metadata == {"sequences": "2"}
    assert driven.unload("good", drain=True) == 2
    host.do(lambda: host.registry.release(number, 2))
    assert driven.list().adapters == ()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_load_waits_for_memory_as_long_as_it_may(host: AdapterHost, kind: str) -> None:
    with drive(kind, host.address, fast()) as driven:
        size = driven.load("good").adapter.size_bytes
        host.do(lambda: setattr(host.registry, "limit_bytes", 2 * size - 1))
        number = host.do(lambda: host.registry.bind("good"))
        loads = len(host.service.calls)

        def before_load() -> None:
            if len(host.service.calls) == loads + 2:
                host.registry.release(number)

        host.service.before_load = before_load
        assert driven.load("other", host.directory).adapter.name == "other"
        assert len(host.service.calls) == loads + 2


def test_what_cannot_be_read_here_is_not_sent(driven: Driven, host: AdapterHost, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing: expected a directory, found nothing"):
        driven.load("mine", tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: expected an adapter .* found no {CONFIG}"):
        driven.load("mine", tmp_path)
    with pytest.raises(NotADirectoryError, match=f"{CONFIG}: expected a directory, found something else"):
        driven.load("mine", host.directory / CONFIG)
    (host.directory / CONFIG).write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ValueError, match=r"adapter_config\.json: expected at most 1048576 bytes"):
        driven.load("mine", host.directory)
    (host.directory / TENSORS).rename(host.directory / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"only adapter_model\.bin, which can run code"):
        driven.load("mine", host.directory)
    (host.directory / "adapter_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=TENSORS):
        driven.load("mine", host.directory)
    assert host.registry.num_loaded == 0
    assert all(messages == [] for _, messages in host.service.calls)


def test_a_file_that_is_cut_short_while_it_is_sent(driven: Driven, host: AdapterHost) -> None:
    path = host.directory / TENSORS
    path.write_bytes(path.read_bytes() + b"\0" * 300_000)  # more than the client reads ahead
    size = path.stat().st_size

    def cut(done: int, total: int) -> None:
        path.write_bytes(path.read_bytes()[: size - 1])

    with pytest.raises(ValueError, match=f"expected {size} bytes, got {size - 1}"):
        driven.load("mine", host.directory, progress=cut)
    assert host.registry.num_loaded == 0
    assert driven.list().adapters == ()


@pytest.mark.parametrize("at", ["the first", "the last"])
def test_what_progress_raises_is_raised(driven: Driven, host: AdapterHost, at: str) -> None:
    def fail(done: int, total: int) -> None:
        if done == (0 if at == "the first" else total):
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        driven.load("mine", host.directory, progress=fail)
    assert len(driven.list().adapters) == (0 if at == "the first" else 1)


def test_a_file_that_the_server_cannot_hold_is_not_read(driven: Driven, host: AdapterHost) -> None:
    with open(host.directory / TENSORS, "r+b") as file:
        file.truncate(1 << 40)
    told: list[int] = []
    tracemalloc.start()
    try:
        with pytest.raises(AdapterBytesExhausted, match="the upload has 1 TiB"):
            driven.load("mine", host.directory, progress=lambda done, _: told.append(done))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert max(told, default=0) < 16 << 20


def test_why_an_upload_is_refused_is_not_lost(driven: Driven, host: AdapterHost) -> None:
    with open(host.directory / TENSORS, "r+b") as file:
        file.truncate(1 << 40)
    for _ in range(8):  # the refusal comes while pieces are written
        with pytest.raises(AdapterBytesExhausted, match="the upload has 1 TiB"):
            driven.load("mine", host.directory)


def test_an_upload_takes_the_memory_of_pieces(host: AdapterHost, driven: Driven) -> None:
    host.info.inline_limit_bytes = 4 << 20
    size = 32 << 20
    with open(host.directory / TENSORS, "r+b") as file:
        file.truncate(size)
    host.do(lambda: setattr(host.registry, "limit_bytes", size))
    host.service.takes_no_bytes = True
    tracemalloc.start()
    try:
        with pytest.raises(InvalidAdapter):
            driven.load("mine", host.directory)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_what_the_server_refuses_is_named(driven: Driven, host: AdapterHost) -> None:
    host.write("biased", bias="all")
    for path in (None, host.folder / "biased"):
        with pytest.raises(InvalidAdapter, match="bias: expected 'none'"):
            driven.load("biased", path)
    with pytest.raises(InvalidAdapter, match="name: expected"):
        driven.load("../good")
    with pytest.raises(InvalidAdapter, match="JSON"):
        driven.load("mine", config=b"garbage", tensors=files(host.directory)[1])
    assert len(host.service.calls) == 4  # none was sent again


def test_arguments_that_contradict_each_other(driven: Driven, host: AdapterHost) -> None:
    config, tensors = files(host.directory)
    for arguments in ({"config": config}, {"tensors": tensors}):
        with pytest.raises(ValueError, match="config, tensors: expected both or none"):
            driven.load("mine", **arguments)
    with pytest.raises(ValueError, match="path: expected none"):
        driven.load("mine", host.directory, config=config, tensors=tensors)
    assert host.service.calls == []


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_slow_upload_is_not_begun_anew(host: AdapterHost, kind: str) -> None:
    with drive(kind, host.address, fast(attempt_timeout_s=0.1)) as driven:
        driven.load("mine", host.directory, progress=lambda done, _: time.sleep(0.5 if done == 0 else 0.0))
        assert len(host.service.calls) == 1
        with pytest.raises(DeadlineExceeded):
            driven.load("other", host.directory, progress=lambda done, _: time.sleep(0.05), timeout_s=0.1)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_upload_survives_connections_that_break(host: AdapterHost, kind: str) -> None:
    async with KillingProxy(host.address, [3_000] * 3) as proxy:
        if kind == "sync":
            with Client(proxy.address, retry=fast()) as blocking:
                loaded = await asyncio.to_thread(blocking.adapters.load, "mine", host.directory)
        else:
            async with AsyncClient(proxy.address, retry=fast()) as client:
                loaded = await client.adapters.load("mine", host.directory)
        assert not loaded.already_loaded and proxy.kills == 3
    assert host.registry.num_loaded == 1
    async with AsyncClient(host.address, retry=fast(max_attempts=1)) as client:
        # There is room for the largest upload again: no byte of those that broke off is counted any more.
        config, _ = files(host.directory)
        with pytest.raises(InvalidAdapter):
            await client.adapters.load("other", config=config.ljust(1 << 20), tensors=bytes(LIMIT_BYTES))


def slowly(begun: asyncio.Event) -> Callable[[int, int], None]:
    """A `progress` that takes its time, and sets an event of this loop."""
    loop = asyncio.get_running_loop()

    def progress(done: int, total: int) -> None:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.02)

    return progress


async def test_a_cancelled_upload_leaves_nothing_and_the_client_goes_on(host: AdapterHost) -> None:
    begun = asyncio.Event()
    async with AsyncClient(host.address, retry=fast()) as client:
        loading = asyncio.create_task(client.adapters.load("mine", host.directory, progress=slowly(begun)))
        await begun.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert (await client.adapters.list()).adapters == ()
        assert not (await client.adapters.load("mine", host.directory)).already_loaded


async def test_a_client_that_is_disconnected_loads_no_more(host: AdapterHost) -> None:
    begun = asyncio.Event()
    client = AsyncClient(host.address, retry=fast())
    loading = asyncio.create_task(client.adapters.load("mine", host.directory, progress=slowly(begun)))
    await begun.wait()
    await client.disconnect()
    with pytest.raises(Disconnected):
        await loading
    with pytest.raises(Disconnected):
        await client.adapters.load("mine")
    blocking = Client(host.address, retry=fast())
    blocking.disconnect()
    with pytest.raises(Disconnected):
        blocking.adapters.load("mine")
