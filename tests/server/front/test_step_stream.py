"""StepStream over a real channel: order, errors of one step, malformed messages, bounds and cancellation."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from rigs.layer_calls import HIDDEN, HeldEngine, make_step, reason_of, refused, status_of
from rigs.principals import entry, headers, write_principals
from rigs.until import until

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server.app import Server
from deltaline_server.front.flow_control import StreamWindow
from deltaline_server.front.steps import stepping
from deltaline_server.front.steps.step_message import StreamStep
from deltaline_server.front.steps.step_parser import StepParser
from deltaline_server.front.steps.stepping import STREAM_STEPS


async def test_stream_answers_out_of_order_and_outlives_a_bad_step(stub: Any, engine: HeldEngine) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    stream = stub.StepStream()
    await stream.write(pb.StepStreamRequest(correlation_id=10, step=make_step(opened)))
    await engine.holds_one()
    await stream.write(pb.StepStreamRequest(correlation_id=11, step=make_step(opened, span=9)))
    bad = await stream.read()
    assert (bad.correlation_id, reason_of(bad.status)) == (11, "UNKNOWN_SPAN")
    engine.release()
    good = await stream.read()
    assert (good.correlation_id, list(good.step.outcome)) == (10, [pb.ROW_OUTCOME_EXECUTED])
    await stream.write(pb.StepStreamRequest(correlation_id=12, step=make_step(opened, 2)))
    await stream.done_writing()
    assert ((await stream.read()).correlation_id, await stream.read()) == (12, grpc.aio.EOF)
    assert await stream.code() is grpc.StatusCode.OK


async def test_malformed_message_ends_the_stream_after_the_answers_before_it(
    stub: Any, channel: Any, engine: HeldEngine
) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    stream = channel.stream_stream("/deltaline.v1.LayerService/StepStream")()
    await stream.write(pb.StepStreamRequest(correlation_id=1, step=make_step(opened)).SerializeToString())
    await engine.holds_one()
    await stream.write(b"\xff\xff")
    engine.release()
    answer = pb.StepStreamResponse.FromString(await stream.read())
    assert (answer.correlation_id, list(answer.step.outcome)) == (1, [pb.ROW_OUTCOME_EXECUTED])
    error = await refused(stream.read())
    assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


async def test_bug_in_a_stream_answers_the_step_and_leaves_the_stream(
    server: Server, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    stream = stub.StepStream()
    with monkeypatch.context() as patched:
        patched.setattr(server.runtime.scheduler, "submit", lambda request: 1 / 0)
        await stream.write(pb.StepStreamRequest(correlation_id=1, step=make_step(opened)))
        assert reason_of((await stream.read()).status) == "BUG"
    await stream.write(pb.StepStreamRequest(correlation_id=2, step=make_step(opened)))
    assert list((await stream.read()).step.outcome) == [pb.ROW_OUTCOME_EXECUTED]
    stream.cancel()


async def test_stream_takes_a_bounded_number_of_unanswered_steps(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = STREAM_STEPS + 20
    async with make_server(max_sequences=count) as server, grpc.aio.insecure_channel(server.address) as channel:
        engine = HeldEngine(server, monkeypatch)
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=count))
        stream = stub.StepStream()
        for i in range(count):
            await stream.write(pb.StepStreamRequest(correlation_id=i, step=make_step(opened, rows=slice(i, i + 1))))
        await stream.done_writing()
        await settle(server, STREAM_STEPS)
        engine.release()
        assert sorted([answer.correlation_id async for answer in stream]) == list(range(count))


async def test_steps_tell_the_scheduler_which_connection_they_came_by(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[str] = []
    submit = server.runtime.scheduler.submit

    def noted(request: Any, on_done: Any, turns: int) -> None:
        clients.append(request.client)
        submit(request, on_done, turns)

    monkeypatch.setattr(server.runtime.scheduler, "submit", noted)
    for number in range(2):
        # Channels of the same options would share a connection.
        async with grpc.aio.insecure_channel(server.address, options=[("test.number", number)]) as channel:
            stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
            opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
            await stub.Step(make_step(opened))
            stream = stub.StepStream()
            await stream.write(pb.StepStreamRequest(correlation_id=1, step=make_step(opened, 2)))
            await stream.read()
            stream.cancel()
    assert clients[0] == clients[1] != clients[2] == clients[3] and all(clients)


async def test_streams_together_take_bounded_bytes_and_each_one_step(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stream held is free when it is cancelled, and streams that wait for it go on."""
    monkeypatch.setattr(stepping, "ALL_STREAMS_BYTES", 3 * 20 * HIDDEN * 4)
    async with make_server(max_sequences=12) as server, grpc.aio.insecure_channel(server.address) as channel:
        engine = HeldEngine(server, monkeypatch)
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=12))
        streams = [stub.StepStream() for _ in range(3)]
        for number, stream in enumerate(streams):
            for i in range(4 * number, 4 * number + 4):
                await stream.write(pb.StepStreamRequest(correlation_id=i, step=make_prefill(opened, i, 20)))
            await settle(server, 3 + number)
        streams[0].cancel()
        await settle(server, 6)
        for stream in streams[1:]:
            await stream.done_writing()
        engine.release()
        for first, stream in ((4, streams[1]), (8, streams[2])):
            assert sorted([answer.correlation_id async for answer in stream]) == list(range(first, first + 4))


class Watched(list[Any]):
    """Waypoints of a message, which may be watched."""


async def test_of_a_refused_step_nothing_is_held_while_it_waits_for_room(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    messages: list[weakref.ref[Watched]] = []
    may_go_on = asyncio.Event()
    parse = StepParser.parse_stream_step

    class Waiting(StreamWindow):
        async def acquire(self, num_bytes: int) -> None:
            taken.append(num_bytes)
            await may_go_on.wait()
            await super().acquire(num_bytes)

    def parse_watched(self: StepParser, body: bytes) -> StreamStep:
        parsed, waypoints = parse(self, body), Watched()
        messages.append(weakref.ref(waypoints))
        return parsed._replace(step=parsed.step._replace(waypoints=waypoints))

    monkeypatch.setattr(stepping, "StreamWindow", Waiting)
    monkeypatch.setattr(StepParser, "parse_stream_step", parse_watched)
    async with make_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
        stream = stub.StepStream()
        await stream.write(pb.StepStreamRequest(correlation_id=1, step=make_step(opened, span=9)))
        await until(lambda: taken)
        assert taken == [0] and messages[0]() is None
        may_go_on.set()
        assert reason_of((await stream.read()).status) == "UNKNOWN_SPAN"
        stream.cancel()


async def test_a_message_that_ends_its_stream_is_not_held_until_that_ends(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[weakref.ref[Watched]] = []
    parse = StepParser.parse_stream_step

    def parse_watched(self: StepParser, body: bytes) -> StreamStep:
        held = Watched()
        if not body:
            failed.append(weakref.ref(held))
            raise DecodeError
        return parse(self, body)

    monkeypatch.setattr(StepParser, "parse_stream_step", parse_watched)
    async with make_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        engine = HeldEngine(server, monkeypatch)
        opened = await layer_service_pb2_grpc.LayerServiceStub(channel).OpenSequences(pb.OpenSequencesRequest(count=1))
        stream: Any = channel.stream_stream("/deltaline.v1.LayerService/StepStream")()
        await stream.write(pb.StepStreamRequest(correlation_id=1, step=make_step(opened)).SerializeToString())
        await engine.holds_one()
        await stream.write(b"")
        await until(lambda: failed and failed[0]() is None)  # while the step before it runs
        engine.release()
        assert pb.StepStreamResponse.FromString(await stream.read()).correlation_id == 1
        assert reason_of(status_of(await refused(stream.read()))) == "INVALID_REQUEST"


async def test_streams_of_a_principal_leave_others_their_share(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stepping, "ALL_STREAMS_BYTES", 10 * 20 * HIDDEN * 4)
    file = write_principals(tmp_path / "principals.toml", entry("team", "step"))
    async with (
        make_server(max_sequences=20, principals=file) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        HeldEngine(server, monkeypatch)
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        streams = []
        for name in ("team", "others"):
            opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=8), metadata=headers(name))
            streams.append((stub.StepStream(metadata=headers(name)), [make_prefill(opened, i, 20) for i in range(8)]))
            if name == "team":
                await streams[0][0].write(pb.StepStreamRequest(step=streams[0][1].pop()))
                await settle(server, 1)
                write_principals(Path(file), entry("team", "step"), entry("others", "step"))  # it is alone no more
                await until(lambda: server.principals.generation == 1)
        # Six of ten steps would leave four; three of the five that are left would leave two.
        for (stream, steps), num_queued in zip(streams, (5, 7), strict=True):
            for step in steps:
                await stream.write(pb.StepStreamRequest(step=step))
            await settle(server, num_queued)


async def test_reader_that_stops_holds_the_writer(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies of 128 KiB that nobody reads: only what is in the transport's windows and in the room gets through."""
    num_tokens, count, room = 1024, 80, 4
    monkeypatch.setattr(stepping, "STREAM_BYTES", room * num_tokens * HIDDEN * 4)
    async with make_server(max_sequences=1) as server, grpc.aio.insecure_channel(server.address) as channel:
        submitted = 0
        submit = server.runtime.scheduler.submit

        def counted(request: Any, on_done: Any, turns: int) -> None:
            nonlocal submitted
            submitted += 1
            submit(request, on_done, turns)

        monkeypatch.setattr(server.runtime.scheduler, "submit", counted)
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
        stream = stub.StepStream()

        async def write() -> None:
            for i in range(count):
                step = make_prefill(opened, 0, num_tokens, step=i + 1, position=[i * num_tokens])
                await stream.write(pb.StepStreamRequest(correlation_id=i, step=step))
            await stream.done_writing()

        writer = asyncio.create_task(write())
        await until(lambda: submitted > room)
        before = -1
        while submitted > before:  # until nothing moves any more
            before = submitted
            await asyncio.sleep(0.3)
        assert not writer.done()
        assert room < submitted < 0.75 * count
        assert [answer.correlation_id async for answer in stream] == list(range(count))
        await writer


async def test_stream_ends_when_the_server_stops(make_server: Callable[..., Server]) -> None:
    """An idle stream, as every client holds one, does not hold the stop up."""
    async with make_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
        stream = stub.StepStream()
        await stream.write(pb.StepStreamRequest(correlation_id=1, step=make_step(opened)))
        assert (await stream.read()).correlation_id == 1
        await server.stop()
        assert await stream.code() is grpc.StatusCode.OK  # not cut off once the grace was over


async def settle(server: Server, num_rows: int) -> None:
    """Wait for so many rows in the queue; no more may come."""
    while server.runtime.scheduler.load().queued_rows < num_rows:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert server.runtime.scheduler.load().queued_rows == num_rows


def make_prefill(opened: pb.OpenSequencesResponse, row: int, num_tokens: int, **fields: Any) -> pb.StepRequest:
    """A prefill step of one of the opened sequences."""
    hidden = wire.encode(np.ones((num_tokens, HIDDEN), np.float32))
    values = {"kind": [pb.ROW_KIND_PREFILL], "query_start_loc": [0, num_tokens], "hidden": hidden}
    number = fields.pop("step", 1)
    return make_step(opened, number, rows=slice(row, row + 1), **(values | fields))
