"""StepStream over a real channel: order, errors of one step, malformed messages, bounds and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.layer_calls import HIDDEN, HeldEngine, make_step, reason_of, refused, status_of
from rigs.until import until

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server.app import Server
from deltaline_server.front import layer_service
from deltaline_server.front.flow_control import StreamWindow
from deltaline_server.front.layer_service import STREAM_STEPS


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
    monkeypatch.setattr(layer_service, "ALL_STREAMS_BYTES", 3 * 20 * HIDDEN * 4)
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


async def test_refused_steps_take_room_until_their_answers_are_written(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    class Noted(StreamWindow):
        async def acquire(self, num_bytes: int) -> None:
            taken.append(num_bytes)
            await super().acquire(num_bytes)

    monkeypatch.setattr(layer_service, "StreamWindow", Noted)
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    stream = stub.StepStream()
    step = make_step(opened, span=9)
    await stream.write(pb.StepStreamRequest(correlation_id=1, step=step))
    assert reason_of((await stream.read()).status) == "UNKNOWN_SPAN"
    stream.cancel()
    assert taken == [len(step.hidden.inline)] and taken[0]


async def test_reader_that_stops_holds_the_writer(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies of 128 KiB that nobody reads: only what is in the transport's windows and in the room gets through."""
    num_tokens, count, room = 1024, 80, 4
    monkeypatch.setattr(layer_service, "STREAM_BYTES", room * num_tokens * HIDDEN * 4)
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
