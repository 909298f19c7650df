"""Shared memory end to end: the same bits as inline, and no harm from slices, sizes and files that nobody meant."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from e2e.conftest import server_of
from google.rpc import code_pb2
from numpy.typing import NDArray
from rigs.layer_calls import HeldEngine
from rigs.programs import Program, run_together
from rigs.shared_memory import lies_in_shared_memory, mapped, note_regions
from rigs.small_models import GATED_DELTA_NET
from rigs.target import ADMIN, HIDDEN, LAYER, LEAK, Target, reason_of, target_of
from rigs.until import until

from deltaline import wire
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import tensor_pb2
from deltaline_client import AsyncClient, Client, DeadlineExceeded, Retry, StepConflict
from deltaline_server.app import Server
from deltaline_server.memory.regions import Region, Regions

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20
F32 = np.dtype(np.float32)
ROW_BYTES = HIDDEN * F32.itemsize
EXECUTED, REPLAYED, REFUSED = pb.ROW_OUTCOME_EXECUTED, pb.ROW_OUTCOME_REPLAYED, pb.ROW_OUTCOME_REFUSED

Array = NDArray[Any]


class RawClient:
    """Steps with slices that a test chooses, in a region of its own; and the same steps inline."""

    def __init__(self, target: Target, made: admin.CreateSharedMemoryResponse) -> None:
        self.target, self.region, self.made = target, made.region, made
        self.memory: Array = mapped(made)

    @classmethod
    async def make(cls, target: Target) -> RawClient:
        body = admin.CreateSharedMemoryRequest(size_bytes=MIB).SerializeToString()
        code, text, reply, _ = await target.send(ADMIN + "CreateSharedMemory", body)
        assert code is grpc.StatusCode.OK, text
        return cls(target, admin.CreateSharedMemoryResponse.FromString(reply))

    async def release(self) -> None:
        body = admin.ReleaseSharedMemoryRequest(region=self.region).SerializeToString()
        assert (await self.target.send(ADMIN + "ReleaseSharedMemory", body))[0] is grpc.StatusCode.OK

    def place(self, offset: int, hidden: Array) -> tensor_pb2.Tensor:
        """Write hidden states into the region; the Tensor that names them."""
        self.memory[offset : offset + hidden.nbytes] = hidden.reshape(-1).view(np.uint8)
        return self.named(offset, hidden.shape)

    def named(self, offset: int, shape: tuple[int, ...], region: int | None = None) -> tensor_pb2.Tensor:
        number = self.region if region is None else region
        shared = tensor_pb2.SharedSlice(region=number, offset=offset)
        return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=shape, shared=shared)

    def rows(self, offset: int, count: int) -> Array:
        """Rows of the region, copied."""
        return self.memory[offset : offset + count * ROW_BYTES].view(F32).reshape(count, HIDDEN).copy()

    def step(self, handles: list[int], lengths: list[int], hidden: tensor_pb2.Tensor, **changes: Any) -> pb.StepRequest:
        """A first prefill of each handle, its outputs at 512 KiB."""
        values: dict[str, Any] = {
            "server_epoch": self.target.epoch,
            "sequence": handles,
            "kind": [pb.ROW_KIND_PREFILL] * len(handles),
            "step": [1] * len(handles),
            "position": [0] * len(handles),
            "query_start_loc": np.cumsum([0, *lengths]).tolist(),
            "hidden": hidden,
            "output_slice": pb.OutputSlice(region=self.region, offset=MIB // 2, size_bytes=MIB // 2),
        }
        return pb.StepRequest(**(values | changes))

    def inline_step(self, handles: list[int], lengths: list[int], hidden: Array) -> pb.StepRequest:
        """The same, with hidden states and outputs in the messages."""
        step = self.step(handles, lengths, wire.encode(hidden))
        step.ClearField("output_slice")
        return step

    async def send(self, step: pb.StepRequest) -> pb.StepResponse:
        code, text, reply, _ = await self.target.send(LAYER + "Step", step.SerializeToString())
        assert code is grpc.StatusCode.OK, text
        return pb.StepResponse.FromString(reply)

    async def refusal(self, step: pb.StepRequest) -> str:
        """The reason with which a step is refused whole."""
        _, text, reply, status = await self.target.send(LAYER + "Step", step.SerializeToString())
        assert reply == b"" and not LEAK.search(text), text
        return reason_of(status)


def draw(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(tmp_path_factory: pytest.TempPathFactory, device: str) -> AsyncIterator[Target]:
    """A server that shares 4 MiB, with a witness."""
    server = server_of(GATED_DELTA_NET, tmp_path_factory.mktemp("target"), device, shared_memory_bytes=4 * MIB)
    async with target_of(server) as target:
        yield target


@pytest_asyncio.fixture(loop_scope="module")
async def raw(target: Target) -> AsyncIterator[RawClient]:
    """A client with a region; what it has done has harmed nobody."""
    made = await RawClient.make(target)
    yield made
    await made.release()
    target.close_strays()
    await target.check_unharmed()


async def test_programs_give_the_same_bits_as_inline(make_server: Callable[..., Server], tmp_path: Path) -> None:
    uds = str(tmp_path / "s")
    programs = [Program.draw(seed, 12, HIDDEN) for seed in range(6)]
    async with make_server(shared_memory_bytes=4 * MIB, uds=uds) as server:
        address = f"unix:{uds}"
        async with AsyncClient(address, shared_memory_bytes=2 * MIB) as sharing, AsyncClient(address) as inline:
            mine = await run_together(sharing, await sharing.open_many(6), programs)
            assert server.runtime.regions.used_bytes == 2 * MIB
            theirs = await run_together(inline, await inline.open_many(6), programs)
    for one, other in zip(mine, theirs, strict=True):
        assert [array.tobytes() for array in one] == [array.tobytes() for array in other]


async def test_a_long_prompt_and_arrays_in_the_region(make_server: Callable[..., Server]) -> None:
    prompt = draw(1200, 1)

    def drive(server: Server) -> None:
        with Client(server.address, shared_memory_bytes=4 * MIB) as client, Client(server.address) as inline:
            wanted = inline.open().prefill(prompt)
            assert client.open().prefill(prompt).tobytes() == wanted.tobytes()
            hidden = client.empty((1200, HIDDEN))
            hidden[:] = prompt
            output = client.open().prefill(hidden, copy=False)
            assert client.open().prefill(prompt, output="last").tobytes() == wanted[-1:].tobytes()
            assert lies_in_shared_memory(hidden) and lies_in_shared_memory(output)
            assert output.tobytes() == wanted.tobytes()
            with Client(server.address, shared_memory_bytes=MIB) as refused:  # the server has no more to give
                assert refused.open().prefill(prompt).tobytes() == wanted.tobytes()
                assert not lies_in_shared_memory(refused.empty((1, HIDDEN)))

    async with make_server(shared_memory_bytes=4 * MIB, inline_limit_bytes=8 * MIB) as server:
        await asyncio.to_thread(drive, server)


async def test_a_retry_finds_its_reply_where_it_was(target: Target, raw: RawClient) -> None:
    one, other, *twins = [sequence.handle for sequence in await target.client.open_many(4)]
    prompt = draw(300, 2)
    answer = await raw.send(raw.inline_step(twins, [200, 100], prompt))
    wanted = wire.decode(answer.hidden, limit_bytes=MIB)
    step = raw.step([one, other], [200, 100], raw.place(0, prompt))
    answer = await raw.send(step)
    assert list(answer.outcome) == [EXECUTED] * 2
    assert (answer.hidden.shared.region, answer.hidden.shared.offset) == (raw.region, MIB // 2)
    assert (list(answer.hidden.shape), list(answer.output_start_loc)) == ([300, HIDDEN], [0, 200, 300])
    assert raw.rows(MIB // 2, 300).tobytes() == wanted.tobytes()
    elsewhere = pb.OutputSlice(region=raw.region, offset=256 * 1024, size_bytes=300 * ROW_BYTES)
    for retry in (
        step,
        raw.step([one, other], [200, 100], wire.encode(prompt)),
        raw.step([one, other], [200, 100], step.hidden, output_slice=elsewhere),
    ):
        offset = retry.output_slice.offset
        assert list((await raw.send(retry)).outcome) == [REPLAYED] * 2
        assert raw.rows(offset, 300).tobytes() == wanted.tobytes()
    inline = await raw.send(raw.inline_step([one, other], [200, 100], prompt))
    assert wire.decode(inline.hidden, limit_bytes=MIB).tobytes() == wanted.tobytes()
    other_content = raw.step([one, other], [200, 100], raw.place(256 * 1024, prompt + 1))
    assert [row.status.code for row in (await raw.send(other_content)).row_status] == [code_pb2.ABORTED] * 2


async def test_each_row_keeps_its_place_whatever_is_refused(target: Target, raw: RawClient) -> None:
    sequences = await target.client.open_many(3)
    handles = [sequence.handle for sequence in sequences]
    prompt = draw(6, 3)
    step = raw.step(handles, [1, 2, 3], raw.place(0, prompt), step=[2, 1, 1], position=[0, 0, 0])
    answer = await raw.send(step)
    assert list(answer.outcome) == [REFUSED, EXECUTED, EXECUTED]
    assert (list(answer.output_start_loc), list(answer.hidden.shape)) == ([0, 1, 3, 6], [6, HIDDEN])
    first = raw.rows(MIB // 2, 6)
    assert not first[0].any()
    await sequences[0].prefill(draw(1, 5))
    step.position[0] = 1
    answer = await raw.send(step)
    assert list(answer.outcome) == [EXECUTED, REPLAYED, REPLAYED]
    assert raw.rows(MIB // 2, 6)[1:].tobytes() == first[1:].tobytes()
    poison = prompt.copy()
    poison[4, 0] = np.nan
    answer = await raw.send(raw.step(handles, [1, 2, 3], raw.place(0, poison), step=[3, 2, 2], position=[2, 2, 3]))
    assert list(answer.outcome) == [EXECUTED, EXECUTED, REFUSED]


async def test_a_region_that_ends_in_flight_ends_no_step(
    target: Target, raw: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = target.server.runtime.regions
    sequence, twin = await target.client.open_many(2)
    prompt = draw(100, 6)
    wanted = await twin.prefill(prompt)
    with monkeypatch.context() as patch:
        held = HeldEngine(target.server, patch)
        step = raw.step([sequence.handle], [100], raw.place(0, prompt))
        first = asyncio.create_task(raw.send(step))
        await held.holds_one()
        await raw.release()
        await raw.release()
        assert regions.used_bytes == MIB
        assert await raw.refusal(step) == "INVALID_SHARED_MEMORY"
        held.release()
        assert list((await first).outcome) == [EXECUTED]
    del held
    assert raw.rows(MIB // 2, 100).tobytes() == wanted.tobytes()
    answer = await raw.send(raw.inline_step([sequence.handle], [100], prompt))
    assert list(answer.outcome) == [REPLAYED]  # the kept reply lies in what was the region
    assert wire.decode(answer.hidden, limit_bytes=MIB).tobytes() == wanted.tobytes()
    assert regions.used_bytes == MIB
    target.close_strays()
    await until(lambda: not regions.used_bytes)


async def test_what_is_too_small_or_too_much_is_refused_before_anything_runs(target: Target, raw: RawClient) -> None:
    [sequence] = await target.client.open_many(1)
    prompt = draw(10, 7)

    def step(**changes: Any) -> pb.StepRequest:
        return raw.step([sequence.handle], [10], changes.pop("hidden", None) or raw.place(0, prompt), **changes)

    def outputs(offset: int, size: int, region: int = raw.region) -> pb.OutputSlice:
        return pb.OutputSlice(region=region, offset=offset, size_bytes=size)

    bad = [
        step(output_slice=outputs(MIB // 2, 10 * ROW_BYTES - 1)),
        step(output_slice=outputs(MIB // 2 + 4, 20 * ROW_BYTES)),
        step(output_slice=outputs(MIB - 64, 10 * ROW_BYTES)),
        step(output_slice=outputs(2**64 - 64, 2**64 - 1)),
        step(output_slice=outputs(64, MIB // 2)),  # over its own input
        step(output_slice=outputs(MIB // 2, MIB // 2, raw.region ^ 1)),
        step(hidden=raw.named(4, (10, HIDDEN))),
        step(hidden=raw.named(MIB - 64, (10, HIDDEN))),
        step(hidden=raw.named(0, (10, HIDDEN), region=0)),
        step(hidden=raw.named(0, (10, 2**31 - 1))),
    ]
    for request in bad:
        assert await raw.refusal(request) == "INVALID_SHARED_MEMORY"
    for shape in ((10,), (10, HIDDEN, 1), (10, HIDDEN // 2), (0, HIDDEN)):
        assert await raw.refusal(step(hidden=raw.named(0, shape))) == "INVALID_TENSOR"
    [described] = await target.client.describe([sequence])
    assert described.spans[0].step == 0
    last = step(output=pb.OUTPUT_ROWS_LAST, output_slice=outputs(MIB // 2, ROW_BYTES))
    assert list((await raw.send(last)).hidden.shape) == [1, HIDDEN]


async def test_the_queue_counts_what_is_shared(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with target_of(make_server(shared_memory_bytes=MIB, queue_bytes=100 * ROW_BYTES)) as target:
        raw = await RawClient.make(target)
        handles = [sequence.handle for sequence in await target.client.open_many(2)]
        held = HeldEngine(target.server, monkeypatch)
        first = asyncio.create_task(raw.send(raw.step(handles[:1], [60], raw.place(0, draw(60, 8)))))
        await held.holds_one()
        second = raw.step(handles[1:], [60], raw.place(60 * ROW_BYTES, draw(60, 9)))
        assert await raw.refusal(second) == "QUEUE_FULL"
        held.release()
        assert list((await first).outcome) == [EXECUTED]


async def test_a_client_that_scribbles_harms_only_itself(target: Target, raw: RawClient) -> None:
    rng = np.random.default_rng(0)
    stop = asyncio.Event()

    def scribble() -> None:
        while not stop.is_set():
            raw.memory[:] = rng.integers(0, 256, MIB, dtype=np.uint8)

    scribbling = asyncio.create_task(asyncio.to_thread(scribble))
    try:
        for _ in range(10):
            handles = [sequence.handle for sequence in await target.client.open_many(2)]
            step = raw.step(handles, [300, 70], raw.named(0, (370, HIDDEN)))
            code, text, *_ = await target.send(LAYER + "Step", step.SerializeToString())
            assert code is grpc.StatusCode.OK, text
            target.close_strays()
            await target.check_unharmed()
    finally:
        stop.set()
        await scribbling


@pytest.mark.parametrize("why", ["off", "not the server's", "another server's"])
async def test_the_client_goes_inline_and_says_why(
    make_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    why: str,
) -> None:
    create = Regions.create

    async def create_other(self: Regions, size_bytes: int, lease_s: float | None) -> Region:
        """What a client on another host finds under the name, or the memory of a server that is no more."""
        region = await create(self, size_bytes, lease_s)
        if why == "another server's":
            region.memory[0] ^= 1
            return region
        (tmp_path / "file").write_bytes(region.memory.tobytes())
        return replace(region, fd=os.open(tmp_path / "file", os.O_RDWR))

    monkeypatch.setattr(Regions, "create", create_other)
    server = make_server(shared_memory_bytes=0 if why == "off" else 4 * MIB)
    async with server, AsyncClient(server.address) as inline:
        client = AsyncClient(server.address, shared_memory_bytes=MIB)
        with caplog.at_level(logging.INFO, "deltaline_client"):
            sequence, twin = await client.open(), await inline.open()
            for _ in range(3):
                assert (await sequence.decode(draw(1, 1))).tobytes() == (await twin.decode(draw(1, 1))).tobytes()
        assert len(told_by_client(caplog)) == 1 and "no shared memory" in told_by_client(caplog)[0]
        await client.disconnect()
        await until(lambda: not server.runtime.regions.used_bytes)


def told_by_client(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("deltaline_client")]


@pytest.mark.parametrize("is_changed", [False, True])
async def test_a_step_of_an_array_in_the_region_is_never_resumed_with_others(
    target: Target, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    retry = Retry(max_attempts=1, clock=lambda: 0.0)
    async with AsyncClient(target.server.address, shared_memory_bytes=MIB, retry=retry) as client:
        sequence, twin = await client.open_many(2)
        hidden = await client.empty((100, HIDDEN))
        hidden[:] = draw(100, 4)
        with monkeypatch.context() as patch:
            held = HeldEngine(target.server, patch)
            with pytest.raises(DeadlineExceeded):
                await sequence.prefill(hidden, timeout_s=2.0)
            await held.holds_one()
            hidden[0] += is_changed
            held.release()
        if is_changed:  # while the server could read it
            with pytest.raises(StepConflict):
                await sequence.resume()
        else:
            assert (await sequence.resume()).tobytes() == (await twin.prefill(draw(100, 4))).tobytes()
    target.close_strays()


async def test_memory_of_a_step_without_an_answer_is_not_used_again(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may run it at any time, and writes its outputs where it was told."""
    numbers = note_regions(target.server, monkeypatch)
    retry = Retry(max_attempts=1, clock=lambda: 0.0)  # the timeout begins when the step is sent
    async with AsyncClient(target.server.address, shared_memory_bytes=MIB, retry=retry) as client:
        lost, other, twin = await client.open_many(3)
        await client.empty((1, HIDDEN))
        with monkeypatch.context() as patch:
            held = HeldEngine(target.server, patch)
            with pytest.raises(DeadlineExceeded):
                await lost.prefill(draw(1000, 1), timeout_s=2.0)
            del lost
            await held.holds_one()
            everything = [await client.empty((1, HIDDEN)) for _ in range(MIB // ROW_BYTES - 2100)]
            for array in everything:
                array[:] = 1
            held.release()
        [first, second] = [await sequence.decode(draw(1, 2)) for sequence in (other, twin)]
        assert first.tobytes() == second.tobytes()
        assert all((array == 1).all() for array in everything)
        del everything, array
        # More than is left beside it: it goes inline, and the next in another region.
        await other.prefill(draw(1500, 3))
        assert len(numbers) == 1
        await other.prefill(draw(1500, 3))
        assert len(numbers) == 2
    target.close_strays()
