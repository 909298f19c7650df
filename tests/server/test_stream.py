"""StepStream over a real channel: order, errors of one step, malformed messages, bounds and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from layer_calls import HeldEngine, make_step, reason_of, refused, status_of

from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server.app import Server
from deltaline_server.service import STREAM_STEPS


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return layer_service_pb2_grpc.LayerServiceStub(channel)


@pytest.fixture
def engine(server: Server, monkeypatch: pytest.MonkeyPatch) -> HeldEngine:
    return HeldEngine(server, monkeypatch)


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
        for _ in range(100):
            if server.runtime.scheduler.load().queued_rows == STREAM_STEPS:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert server.runtime.scheduler.load().queued_rows == STREAM_STEPS
        engine.release()
        assert sorted([answer.correlation_id async for answer in stream]) == list(range(count))


async def test_cancelled_stream_cancels_no_step(stub: Any, engine: HeldEngine) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    stream = stub.StepStream()
    await stream.write(pb.StepStreamRequest(correlation_id=1, step=make_step(opened)))
    await engine.holds_one()
    stream.cancel()
    engine.release()
    answer = await stub.Step(make_step(opened))
    assert list(answer.outcome) in ([pb.ROW_OUTCOME_REPLAYED], [pb.ROW_OUTCOME_JOINED])
