"""Shared memory end to end: the same bits as inline, and no harm from slices, sizes and files that nobody meant."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2
from numpy.typing import NDArray
from rigs.faulty_stream import FaultyStream
from rigs.layer_calls import HeldEngine
from rigs.programs import Program, run_together
from rigs.target import ADMIN, HIDDEN, LAYER, LEAK, Target, reason_of

from deltaline import wire
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import tensor_pb2
from deltaline_client import AsyncClient, Client, DeadlineExceeded, Retry
from deltaline_client._shared_memory import regions as shared_module
from deltaline_client._shared_memory.regions import _open
from deltaline_server.app import Server
from deltaline_server.memory.regions import Region, Regions

MIB = 1 << 20
F32 = np.dtype(np.float32)
ROW_BYTES = HIDDEN * F32.itemsize
EXECUTED, REPLAYED, REFUSED = pb.ROW_OUTCOME_EXECUTED, pb.ROW_OUTCOME_REPLAYED, pb.ROW_OUTCOME_REFUSED

Array = NDArray[Any]


class RawClient:
    """Steps with slices that a test chooses, in a region of its own; and the same steps inline."""

    def __init__(self, target: Target, made: admin.CreateSharedMemoryResponse) -> None:
        self.target, self.region, self.made = target, made.region, made
        self.memory: Array = np.frombuffer(_open(made), np.uint8)

    @classmethod
    async def make(cls, target: Target, size_bytes: int = MIB, lease_ms: int = 0) -> RawClient:
        body = admin.CreateSharedMemoryRequest(size_bytes=size_bytes, lease_ms=lease_ms).SerializeToString()
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


@pytest.fixture
async def target(make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Target]:
    """A server that shares 4 MiB, with a witness."""
    monkeypatch.setattr("deltaline_server.app.LEASE_TICK_S", 0.02)
    server = make_server(shared_memory_bytes=4 * MIB)
    async with server, AsyncClient(server.address) as client:
        witness, twin = await client.open_many(2)
        for sequence in (witness, twin):
            await sequence.prefill(draw(9, 4))
        target = Target(server, client, witness, twin)
        yield target
        await target.channel.close()


@pytest.mark.parametrize("transport", ["tcp", "uds"])
async def test_programs_give_the_same_bits_as_inline(
    make_server: Callable[..., Server], tmp_path: Path, transport: str
) -> None:
    uds = str(tmp_path / "s")
    programs = [Program.draw(seed, 30, HIDDEN) for seed in range(6)]
    async with make_server(shared_memory_bytes=4 * MIB, uds=uds) as server:
        address = server.address if transport == "tcp" else f"unix:{uds}"
        async with AsyncClient(address, shared_memory_bytes=2 * MIB) as sharing, AsyncClient(address) as inline:
            mine = await run_together(sharing, await sharing.open_many(6), programs)
            assert server.runtime.regions.used_bytes == 2 * MIB
            theirs = await run_together(inline, await inline.open_many(6), programs)
    for one, other in zip(mine, theirs, strict=True):
        assert [array.tobytes() for array in one] == [array.tobytes() for array in other]


def test_a_long_prompt_and_arrays_in_the_region(make_server: Callable[..., Server]) -> None:
    prompt = draw(5000, 1)

    async def serve(server: Server) -> None:
        async with server:
            await asyncio.to_thread(drive, server)

    def drive(server: Server) -> None:
        with Client(server.address, shared_memory_bytes=4 * MIB) as client, Client(server.address) as inline:
            wanted = inline.open().prefill(prompt)
            assert client.open().prefill(prompt).tobytes() == wanted.tobytes()
            hidden = client.empty((5000, HIDDEN))
            hidden[:] = prompt
            output = client.open().prefill(hidden, copy=False)
            assert client.open().prefill(prompt, output="last").tobytes() == wanted[-1:].tobytes()
            shared = client._shared._region
            assert shared is not None and shared[1].offset(hidden) is not None and shared[1].offset(output) is not None
            assert output.tobytes() == wanted.tobytes()
            with Client(server.address, shared_memory_bytes=MIB) as refused:  # the server has no more to give
                assert refused.open().prefill(prompt).tobytes() == wanted.tobytes()
                assert refused._shared._region is None

    asyncio.run(serve(make_server(shared_memory_bytes=4 * MIB, inline_limit_bytes=8 * MIB)))


async def test_a_retry_finds_its_reply_where_it_was(target: Target) -> None:
    raw = await RawClient.make(target)
    one, other, *_ = handles = [sequence.handle for sequence in await target.client.open_many(4)]
    prompt = draw(300, 2)
    inline = raw.step(handles[2:], [200, 100], wire.encode(prompt))
    inline.ClearField("output_slice")
    wanted = wire.decode((await raw.send(inline)).hidden, limit_bytes=MIB)
    step = raw.step([one, other], [200, 100], raw.place(0, prompt))
    answer = await raw.send(step)
    assert list(answer.outcome) == [EXECUTED] * 2
    assert (answer.hidden.shared.region, answer.hidden.shared.offset) == (raw.region, MIB // 2)
    assert (list(answer.hidden.shape), list(answer.output_start_loc)) == ([300, HIDDEN], [0, 200, 300])
    assert raw.rows(MIB // 2, 300).tobytes() == wanted.tobytes()
    for retry in (step, raw.step([one, other], [200, 100], wire.encode(prompt))):  # the second one's input is inline
        answer = await raw.send(retry)
        assert list(answer.outcome) == [REPLAYED] * 2
        assert raw.rows(MIB // 2, 300).tobytes() == wanted.tobytes()
    elsewhere = pb.OutputSlice(region=raw.region, offset=256 * 1024, size_bytes=300 * ROW_BYTES)
    assert list((await raw.send(raw.step([one, other], [200, 100], step.hidden, output_slice=elsewhere))).outcome) == [
        2,
        2,
    ]
    assert raw.rows(256 * 1024, 300).tobytes() == wanted.tobytes()
    inline = raw.step([one, other], [200, 100], wire.encode(prompt))
    inline.ClearField("output_slice")
    assert wire.decode((await raw.send(inline)).hidden, limit_bytes=MIB).tobytes() == wanted.tobytes()
    other_content = raw.step([one, other], [200, 100], raw.place(512 * 512, prompt + 1))
    assert [row.status.code for row in (await raw.send(other_content)).row_status] == [code_pb2.ABORTED] * 2
    target.close_strays()
    await target.check_unharmed()


async def test_each_row_keeps_its_place_whatever_is_refused(target: Target) -> None:
    raw = await RawClient.make(target)
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
    assert list((await raw.send(step)).outcome) == [REPLAYED] * 3
    assert raw.rows(MIB // 2, 6)[1:].tobytes() == first[1:].tobytes()
    poison = prompt.copy()
    poison[4, 0] = np.nan
    answer = await raw.send(raw.step(handles, [1, 2, 3], raw.place(0, poison), step=[3, 2, 2], position=[2, 2, 3]))
    assert list(answer.outcome) == [EXECUTED, EXECUTED, REFUSED]


@pytest.mark.parametrize("ends", ["released", "expired"])
async def test_a_region_that_ends_in_flight_ends_no_step(
    target: Target, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    raw = await RawClient.make(target, lease_ms=500 if ends == "expired" else 0)
    regions = target.server.runtime.regions
    [sequence, twin] = await target.client.open_many(2)
    prompt = draw(100, 6)
    wanted = await twin.prefill(prompt)
    held = HeldEngine(target.server, monkeypatch)
    step = raw.step([sequence.handle], [100], raw.place(0, prompt))
    first = asyncio.create_task(raw.send(step))
    await held.holds_one()
    if ends == "released":
        await raw.release()
        await raw.release()
    else:
        await asyncio.sleep(0.7)
    assert not regions._regions and regions.used_bytes == MIB
    assert await raw.refusal(step) == "INVALID_SHARED_MEMORY"
    held.release()
    assert list((await first).outcome) == [EXECUTED]
    assert raw.rows(MIB // 2, 100).tobytes() == wanted.tobytes()
    inline = raw.step([sequence.handle], [100], wire.encode(prompt))
    inline.ClearField("output_slice")
    answer = await raw.send(inline)  # the kept reply lies in what was the region
    assert list(answer.outcome) == [REPLAYED]
    assert wire.decode(answer.hidden, limit_bytes=MIB).tobytes() == wanted.tobytes()
    assert regions.used_bytes == MIB
    await target.client.close([twin])
    body = pb.CloseSequencesRequest(server_epoch=target.epoch, sequence=[sequence.handle]).SerializeToString()
    await target.send(LAYER + "CloseSequences", body)
    held._held.clear()
    for _ in range(200):
        await asyncio.sleep(0.02)
        if not regions.used_bytes:
            break
    assert regions.used_bytes == 0
    await target.check_unharmed()


async def test_what_is_too_small_or_too_much_is_refused_before_anything_runs(target: Target) -> None:
    raw = await RawClient.make(target)
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
    target.close_strays()
    await target.check_unharmed()


async def test_the_queue_counts_what_is_shared(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(shared_memory_bytes=MIB, queue_bytes=100 * ROW_BYTES)
    async with server, AsyncClient(server.address) as client:
        target = Target(server, client, *await client.open_many(2))
        raw = await RawClient.make(target)
        handles = [sequence.handle for sequence in await client.open_many(2)]
        held = HeldEngine(server, monkeypatch)
        first = asyncio.create_task(raw.send(raw.step(handles[:1], [60], raw.place(0, draw(60, 8)))))
        await held.holds_one()
        second = raw.step(handles[1:], [60], raw.place(60 * ROW_BYTES, draw(60, 9)))
        assert await raw.refusal(second) == "QUEUE_FULL"
        held.release()
        assert list((await first).outcome) == [EXECUTED]
        await target.channel.close()


async def test_a_client_can_not_cut_the_memory_off(target: Target) -> None:
    raw = await RawClient.make(target)
    for flags in (os.O_RDWR, os.O_RDWR | os.O_TRUNC):
        with pytest.raises(PermissionError):
            os.ftruncate(os.open(raw.made.name, flags), 0)
    [sequence] = await target.client.open_many(1)
    assert list((await raw.send(raw.step([sequence.handle], [5], raw.place(0, draw(5, 1))))).outcome) == [1]
    target.close_strays()
    await target.check_unharmed()


async def test_a_client_that_scribbles_harms_only_itself(target: Target) -> None:
    raw = await RawClient.make(target)
    rng = np.random.default_rng(0)
    stop = asyncio.Event()

    def scribble() -> None:
        while not stop.is_set():
            raw.memory[:] = rng.integers(0, 256, MIB, dtype=np.uint8)

    scribbling = asyncio.create_task(asyncio.to_thread(scribble))
    for _ in range(30):
        handles = [sequence.handle for sequence in await target.client.open_many(2)]
        step = raw.step(handles, [300, 70], raw.named(0, (370, HIDDEN)))
        code, text, *_ = await target.send(LAYER + "Step", step.SerializeToString())
        assert code is grpc.StatusCode.OK, text
        target.close_strays()
        await target.check_unharmed()
    stop.set()
    await scribbling


async def test_random_slices_are_never_the_servers_fault(target: Target) -> None:
    raw = await RawClient.make(target)
    rng = np.random.default_rng(11)
    codes: set[grpc.StatusCode] = set()

    def pick(numbers: list[int]) -> int:  # numpy would make floats of numbers of 64 bits
        return numbers[int(rng.integers(len(numbers)))]

    def edge() -> int:
        near = pick([0, 64, MIB // 2, MIB - 64, MIB, 2**31, 2**32, 2**63, 2**64 - 64])
        return min(2**64 - 1, max(0, near + int(rng.choice([0, 0, 0, 1, -1, 64, -64, 4096]))))

    for _ in range(12):
        sequences = await target.client.open_many(20)
        bodies = []
        for sequence in sequences:
            region = pick([raw.region] * 8 + [0, 1])
            length = int(rng.choice([1, 2, 100, MIB // ROW_BYTES // 2, MIB // ROW_BYTES]))
            dims = [(length, HIDDEN)] * 6 + [(2**31 - 1, HIDDEN), (2**31 - 1,) * 4, (0, HIDDEN), (-1, HIDDEN), ()]
            hidden = raw.named(edge(), dims[int(rng.integers(len(dims)))], region=region)
            slice_ = pb.OutputSlice(region=region, offset=edge(), size_bytes=edge())
            step = raw.step([sequence.handle], [length], hidden, output_slice=slice_, output=int(rng.integers(0, 4)))
            if rng.random() < 0.3:
                step.ClearField("output_slice")
            bodies.append(step.SerializeToString())
        for code, text, reply, status in await asyncio.gather(*(target.send(LAYER + "Step", body) for body in bodies)):
            codes.add(code)
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), (code, text)
            assert reply or (reason_of(status) and not LEAK.search(text)), text
        target.close_strays()
    assert len(codes) == 2
    await target.check_unharmed()


@pytest.mark.parametrize("why", ["off", "remote", "another server's"])
async def test_the_client_goes_inline_and_says_why(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    if why == "remote":
        monkeypatch.setattr(shared_module, "_MEMORY_FILE", "/memfd:of another host")
    if why == "another server's":
        create = Regions.create

        async def create_other(self: Regions, size_bytes: int, lease_s: float | None) -> Region:
            region = await create(self, size_bytes, lease_s)
            region.memory[0] ^= 1
            return region

        monkeypatch.setattr(Regions, "create", create_other)
    server = make_server(shared_memory_bytes=0 if why == "off" else 4 * MIB)
    async with server, AsyncClient(server.address) as inline:
        client = AsyncClient(server.address, shared_memory_bytes=MIB)
        with caplog.at_level(logging.INFO, "deltaline_client"):
            sequence, twin = await client.open(), await inline.open()
            for _ in range(3):
                assert (await sequence.decode(draw(1, 1))).tobytes() == (await twin.decode(draw(1, 1))).tobytes()
        told = [record.getMessage() for record in caplog.records if record.name.startswith("deltaline_client")]
        assert len(told) == 1 and "no shared memory" in told[0]
        assert server.runtime.regions._regions == {}
        await client.disconnect()


async def test_the_client_outlives_its_region(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    regions = target.server.runtime.regions
    async with AsyncClient(target.server.address, shared_memory_bytes=MIB) as client:
        [sequence], [twin] = await client.open_many(1), await target.client.open_many(1)
        with caplog.at_level(logging.INFO, "deltaline_client"):
            for turn in range(6):
                token = draw(1, turn)
                assert (await sequence.decode(token)).tobytes() == (await twin.decode(token)).tobytes()
                assert len(regions._regions) == (turn % 2 == 0)
                if turn % 2 == 0:
                    regions.release(next(iter(regions._regions)))
        told = [record.getMessage() for record in caplog.records if record.name.startswith("deltaline_client")]
        assert len(told) == 3 and all("shared memory is gone" in line for line in told)


async def test_a_full_region_sends_steps_inline(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncClient(target.server.address, shared_memory_bytes=MIB) as client:
        [sequence], [twin] = await client.open_many(1), await target.client.open_many(1)
        everything = await client.empty((MIB // ROW_BYTES, HIDDEN))
        with caplog.at_level(logging.INFO, "deltaline_client"):
            for turn in range(4):
                if turn == 2:
                    del everything
                prompt = draw(20, turn)
                output = await sequence.prefill(prompt, copy=False)
                assert output.tobytes() == (await twin.prefill(prompt)).tobytes()
                region = client._shared._region
                assert region is not None and (region[1].offset(output) is None) == (turn < 2)
        told = [record.getMessage() for record in caplog.records if record.name.startswith("deltaline_client")]
        assert len(told) == 1 and "full" in told[0]


async def test_memory_of_a_step_without_an_answer_is_not_used_again(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may run it at any time, and writes its outputs where it was told."""
    retry = Retry(max_attempts=1)
    async with AsyncClient(target.server.address, shared_memory_bytes=MIB, retry=retry) as client:
        lost, other, twin = await client.open_many(3)
        held = HeldEngine(target.server, monkeypatch)
        with pytest.raises(DeadlineExceeded):
            await lost.prefill(draw(1000, 1), timeout_s=0.5)
        del lost
        everything = [await client.empty((1, HIDDEN)) for _ in range(MIB // ROW_BYTES - 2100)]
        for array in everything:
            array[:] = 1
        held.release()
        [first, second] = [await sequence.decode(draw(1, 2)) for sequence in (other, twin)]
        assert first.tobytes() == second.tobytes()
        assert all((array == 1).all() for array in everything)
        regions = target.server.runtime.regions
        [old] = regions._regions
        del everything
        await other.prefill(
            draw(1500, 3)
        )  # more than is left beside it: it goes inline, and the next in another region
        assert list(regions._regions) == [old]
        await other.prefill(draw(1500, 3))
        [new] = regions._regions
        assert new != old


async def test_lost_calls_change_no_bit(target: Target) -> None:
    """A third of the attempts get no answer, before or after the server has taken them."""
    programs = [Program.draw(seed, 40, HIDDEN, lengths=(1, 2, 17)) for seed in range(4)]
    rng = np.random.default_rng(5)
    retry = Retry(initial_backoff_s=0.002, max_backoff_s=0.01)
    async with AsyncClient(target.server.address, shared_memory_bytes=MIB // 4, retry=retry) as client:
        sequences = await client.open_many(4)
        stream = FaultyStream(client, lambda: rng.choice(["lost", "unanswered", "sent"], p=[0.15, 0.18, 0.67]))
        mine = await run_together(client, sequences, programs)
    theirs = await run_together(target.client, await target.client.open_many(4), programs)
    for one, other in zip(mine, theirs, strict=True):
        assert [array.tobytes() for array in one] == [array.tobytes() for array in other]
    assert stream.faults > 10
    target.close_strays()
    await target.check_unharmed()
