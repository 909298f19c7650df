"""The client's region of shared memory while it is being made, and which memory it may be."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.shared_memory import lies_in_shared_memory

from deltaline.v1 import admin_service_pb2 as admin
from deltaline_client import AsyncClient, Client, InvalidSharedMemory
from deltaline_client._shared_memory.regions import SharedMemory
from deltaline_client._transport.channels.channel import MAX_TENSOR_BYTES
from deltaline_client._transport.flow import Call, Sleep, TakeMemory
from deltaline_client._transport.retry import Attempts, Retry

SIZE = 1 << 20
NONCE = b"0123456789abcdef"


@dataclass
class Maker:
    """Makes regions for a fake server once `released` is set; with `refuses`, none. seals: those of the memory."""

    count: int = 0
    refuses: bool = False
    seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    asked: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    files: list[int] = field(default_factory=list)

    def answer(self, request: Any, context: Any) -> admin.CreateSharedMemoryResponse:
        """What the fake server's CreateSharedMemory does."""
        self.asked.set()
        self.released.wait(60)
        if self.refuses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        return self.make(request.size_bytes)

    def make(self, size_bytes: int) -> admin.CreateSharedMemoryResponse:
        """A region; they are numbered from 1."""
        self.count += 1
        file = os.memfd_create("deltaline", os.MFD_ALLOW_SEALING)
        self.files.append(file)
        os.write(file, NONCE)
        os.ftruncate(file, size_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, self.seals)
        name = f"/proc/{os.getpid()}/fd/{file}"
        return admin.CreateSharedMemoryResponse(region=self.count, name=name, size_bytes=size_bytes, nonce=NONCE)

    def close(self) -> None:
        self.released.set()
        for file in self.files:
            os.close(file)


@pytest.fixture
def maker(server: Any) -> Iterator[Maker]:
    made = Maker()
    server.info.shared_memory_bytes = SIZE
    server.make_region = made.answer
    yield made
    made.close()


@pytest.mark.parametrize("refuses", [False, True])
def test_threads_wait_for_the_region_that_one_asks_for(server: Any, maker: Maker, refuses: bool) -> None:
    maker.refuses = refuses
    with Client(server.address, shared_memory_bytes=SIZE) as client, ThreadPoolExecutor(4) as threads:
        client.info()
        calls = [threads.submit(client.empty, (3, 8)) for _ in range(4)]
        assert maker.asked.wait(60)
        with pytest.raises(TimeoutError):
            calls[0].result(0.1)
        maker.released.set()
        arrays = [call.result(60) for call in calls]
        assert [lies_in_shared_memory(array) for array in arrays] == [not refuses] * 4
        assert maker.count == (not refuses)


async def test_tasks_wait_for_the_region_that_one_asks_for(server: Any, maker: Maker) -> None:
    async with AsyncClient(server.address, shared_memory_bytes=SIZE) as client:
        await client.info()
        calls = [asyncio.create_task(client.empty((3, 8))) for _ in range(4)]
        assert await asyncio.to_thread(maker.asked.wait, 60)
        maker.asked.clear()
        calls[0].cancel()  # the one that asks: the next asks anew
        assert await asyncio.to_thread(maker.asked.wait, 60)
        maker.released.set()
        arrays = await asyncio.gather(*calls[1:])
        assert [lies_in_shared_memory(array) for array in arrays] == [True] * 3


def asked_of_grpc(flow: Any) -> None:
    """The flow asks for a region, where there is no link."""
    assert isinstance(next(flow), TakeMemory)
    assert isinstance(flow.send(None), Call)


def test_the_wait_ends_with_the_calls_own_timeout() -> None:
    now = [0.0]
    limits: Any = SimpleNamespace(shared_memory_bytes=SIZE, server_epoch=1, server="")

    def attempts() -> Attempts:
        return Attempts(Retry(clock=lambda: now[0]), 2.0)

    shared = SharedMemory(SIZE)
    asks, waits = shared.ready(limits, attempts()), shared.ready(limits, attempts())
    asked_of_grpc(asks)
    for now[0] in (0.0, 1.0, 1.9):
        assert isinstance(next(waits), Sleep)
    now[0] = 2.0
    assert list(waits) == []
    asks.close()  # cancelled: the next call asks
    asked_of_grpc(shared.ready(limits, attempts()))


def test_steps_of_a_call_that_waited_in_vain_go_inline(server: Any, maker: Maker) -> None:
    seconds = itertools.count()  # each look at the clock takes one
    retry = Retry(clock=lambda: float(next(seconds)))
    with Client(server.address, shared_memory_bytes=SIZE, retry=retry) as client, ThreadPoolExecutor(1) as threads:
        sequence = client.open()
        client.info()
        slow = threads.submit(client.empty, (3, 8))
        assert maker.asked.wait(60)
        assert sequence.decode([1.0] * 8, timeout_s=60.0).tolist() == [1.0] * 8
        assert server.requests["Step"][0].hidden.WhichOneof("payload") == "inline"
        maker.released.set()
        assert lies_in_shared_memory(slow.result(60))


def test_memory_that_could_shrink_is_not_used(server: Any, maker: Maker) -> None:
    maker.seals = fcntl.F_SEAL_GROW
    maker.released.set()
    with Client(server.address, shared_memory_bytes=SIZE) as client:
        assert not lies_in_shared_memory(client.empty((3, 8)))


@pytest.mark.parametrize("size", [-1, 1.5, "1MiB"])
@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_a_size_that_can_not_be_is_refused(make: Any, size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^shared_memory_bytes: expected .*, got "):
        make("localhost", shared_memory_bytes=size)


class Interrupting:
    """A placement without an answer; when it is looked at for the second time, another call runs."""

    def __init__(self, placement: Any, call: Callable[[], object]) -> None:
        self._placement, self._call, self._looks = placement, call, 0

    @property
    def region(self) -> int:
        self._looks += 1
        if self._looks == 2:
            self._call()
        region: int = self._placement.region
        return region


def test_a_full_region_that_another_call_has_replaced_is_not_replaced_again() -> None:
    maker, shared, hidden = Maker(), SharedMemory(SIZE), np.zeros((1, 8), np.float32)
    limits: Any = SimpleNamespace(shared_memory_bytes=SIZE, server_epoch=1, server="")
    released: list[int] = []

    def run(flow: Any) -> None:
        """Answer what a flow calls."""
        with suppress(StopIteration):
            command = next(flow)
            while True:
                if isinstance(command, TakeMemory):
                    command = flow.send(None)
                    continue
                is_new = isinstance(command.request, admin.CreateSharedMemoryRequest)
                if not is_new:
                    released.append(command.request.region)
                command = flow.send(maker.make(SIZE) if is_new else None)

    def place(name: str, room: int) -> Any:
        return shared.place((name,), [hidden], hidden.shape, (room,))

    def replace() -> None:
        assert place("another", SIZE // 8) is None
        run(shared.ready(limits, Attempts(Retry(), 60.0)))

    run(shared.ready(limits, Attempts(Retry(), 60.0)))
    unanswered: Any = Interrupting(place("unanswered", SIZE // 5), replace)
    shared.end_attempt(("unanswered",), unanswered, is_over=False)
    assert place("late", SIZE // 8) is None
    placement = place("next", 8)
    assert placement is not None and placement.region == 2 and released == [1]
    maker.close()


@pytest.mark.parametrize("inline_limit_bytes", [SIZE, 1 << 30])
def test_what_the_link_places_unasked_can_go_by_grpc_as_well(inline_limit_bytes: int) -> None:
    """A step that is placed and lost with the link goes on as a message."""
    most_bytes = min(inline_limit_bytes, MAX_TENSOR_BYTES)
    shared = SharedMemory(0)
    limits: Any = SimpleNamespace(server_epoch=1, server="")
    shared.linked(inline_limit_bytes)

    def asks(num_bytes: int) -> list[int]:
        """The bytes that are asked for behind a request of so many."""
        hidden = np.broadcast_to(np.zeros(1, np.uint8), (num_bytes, 1))
        assert shared.place(("one",), [hidden], hidden.shape, (1, 1)) is None
        command = next(shared.ready(limits, Attempts(Retry(), 2.0)), None)
        return [command.size_bytes] if isinstance(command, TakeMemory) else []

    assert asks(most_bytes + 1) == []
    assert asks(most_bytes) == [4 * most_bytes]


def with_region(size_bytes: int) -> SharedMemory:
    """Shared memory that has a region."""
    shared = SharedMemory(size_bytes)
    give_region(shared, 1, size_bytes)
    return shared


def give_region(shared: SharedMemory, number: int, size_bytes: int) -> None:
    limits: Any = SimpleNamespace(shared_memory_bytes=size_bytes, server_epoch=1, server="")
    asks = shared.ready(limits, Attempts(Retry(), 2.0))
    assert isinstance(next(asks), TakeMemory)
    file = os.memfd_create("deltaline")
    os.ftruncate(file, size_bytes)
    with pytest.raises(StopIteration):
        asks.send((number, mmap.mmap(file, size_bytes)))
    os.close(file)


def test_a_request_of_the_same_shapes_takes_the_place_of_the_one_before() -> None:
    shared, rows, one = with_region(SIZE), np.ones((2, 8), np.float32), np.full((4, 8), 2, np.float32)
    first = shared.place((1,), list(np.concatenate([rows, rows])), (4, 8), (4, 8))
    assert first is not None
    other = shared.place((2,), [one], (4, 8), (4, 8))
    assert other is not None and other.hidden_offset != first.hidden_offset  # the first request is not over
    shared.spare(first)
    again = shared.place((3,), [one], (4, 8), (4, 8))
    assert again is first
    np.testing.assert_array_equal(again.hidden, one)
    shared.spare(again)
    shared.spare(other)  # one is kept, the last
    assert shared.place((4,), [one], (4, 8), (4, 8)) is other


@pytest.mark.parametrize("change", ["rows", "outputs", "elements", "another region"])
def test_a_request_of_other_shapes_gets_another_place(change: str) -> None:
    shared, hidden = with_region(SIZE), np.ones((4, 8), np.float32)
    first = shared.place((1,), [hidden], (4, 8), (4, 8))
    assert first is not None
    shared.spare(first)
    shape, output_shape = (4, 8), (4, 8)
    match change:
        case "rows":
            hidden, shape = hidden[:2], (2, 8)
        case "outputs":
            output_shape = (2, 8)
        case "elements":
            hidden = hidden.astype(np.float16)
        case _:
            shared.lost(first, InvalidSharedMemory("gone"))
            give_region(shared, 2, SIZE)
    second = shared.place((2,), [hidden], shape, output_shape)
    assert second is not None and second is not first
    assert (second.hidden.shape, second.room.shape, second.hidden.dtype) == (shape, output_shape, hidden.dtype)


def test_hidden_states_that_lie_in_the_region_are_not_handed_out_again() -> None:
    shared = with_region(SIZE)
    own = shared.empty((4, 8), np.dtype(np.float32))
    own[:] = 1
    first = shared.place((1,), [own], (4, 8), (4, 8))
    assert first is not None and np.shares_memory(first.hidden, own)
    shared.spare(first)
    second = shared.place((2,), [np.zeros((4, 8), np.float32)], (4, 8), (4, 8))
    assert second is not None and not np.shares_memory(second.hidden, own)
    shared.spare(second)
    third = shared.place((3,), [own], (4, 8), (4, 8))
    assert third is not None and np.shares_memory(third.hidden, own)
    assert (own == 1).all()


def test_a_step_that_is_sent_again_goes_elsewhere_than_an_array_of_the_callers() -> None:
    """Which may have been changed since, and is held: the server may still read it."""
    shared = with_region(SIZE)
    own = shared.empty((4, 8), np.dtype(np.float32))
    own[:] = 1
    first = shared.place((1,), [own], (4, 8), (4, 8))
    assert first is not None and shared.place((1,), [own], (4, 8), (4, 8)) is not first  # nothing is in doubt yet
    shared.end_attempt((1,), first, is_over=False)
    assert shared.place((1,), [own], (4, 8), (4, 8)) is first
    kept = own.copy()
    own[:] = 2
    again = shared.place((1,), [kept], (4, 8), (4, 8))
    assert again is not None and again.is_copy and again.former is first
    np.testing.assert_array_equal(again.hidden, kept)
    assert not {again.hidden_offset, again.room_offset} & {first.hidden_offset, first.room_offset}
    shared.end_attempt((1,), again, is_over=False)
    assert shared.place((1,), [kept], (4, 8), (4, 8)) is again


def test_a_spare_place_gives_way() -> None:
    shared = with_region(SIZE)
    first = shared.place((1,), [np.ones((2, 1 << 16), np.float32)], (2, 1 << 16), (1, 8))
    assert first is not None
    shared.spare(first)
    del first
    assert lies_in_shared_memory(shared.empty((3, 1 << 16), np.dtype(np.float32)))
