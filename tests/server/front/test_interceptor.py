"""What surrounds a call, with a handler and a context that the test plays."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc.aio import AbortError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from rigs.until import until

from deltaline.v1 import layer_service_pb2
from deltaline_server.front.interceptor import Interceptor
from deltaline_server.front.trust.principals import Principals
from deltaline_server.front.trust.refusals import BURST, Refusals
from deltaline_server.telemetry.metrics import Metrics

STEP, STEP_STREAM = "/deltaline.v1.LayerService/Step", "/deltaline.v1.LayerService/StepStream"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Context:
    """A call by the link. held_s: for how long its refusal is kept back, once that is known."""

    def __init__(self) -> None:
        self.held_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.may_end = asyncio.Event()

    def peer(self) -> str:
        return "link:7:1"

    async def hold(self, seconds: float) -> None:
        self.held_s.set_result(seconds)
        await self.may_end.wait()

    async def abort(self, *status: Any) -> None:
        raise AbortError


class Body:
    """A message, which may be watched."""


def refuse(body: Any) -> None:
    raise DecodeError


async def test_a_refusal_that_is_kept_back_keeps_no_message() -> None:
    metrics = Metrics([layer_service_pb2.DESCRIPTOR.services_by_name["LayerService"]])
    refusals = Refusals(lambda: 0.0)
    never: Any = None
    handler: Any = grpc.unary_unary_rpc_method_handler(never, refuse)
    wrapped: Any = Interceptor(metrics, Principals(), refusals=refusals).wrap(handler, STEP)
    for _ in range(BURST):
        refusals.hold_s("anonymous")
    body, context = Body(), Context()
    watched = weakref.ref(body)
    answering = asyncio.create_task(wrapped.unary_unary(body, context))
    del body
    async with asyncio.timeout(60):
        assert await context.held_s > 0
    assert watched() is None
    context.may_end.set()
    with pytest.raises(AbortError):
        await answering


async def test_a_stream_whose_handler_waits_keeps_no_message() -> None:
    metrics, bodies, is_waiting = Metrics([layer_service_pb2.DESCRIPTOR.services_by_name["LayerService"]]), [Body()], []
    watched = weakref.ref(bodies[0])

    async def read() -> Body:
        return bodies.pop()

    async def answer(messages: Any, context: Any) -> Any:
        assert await anext(messages) == "parsed"
        is_waiting.append(True)
        await context.may_end.wait()
        yield b"answer"

    handler: Any = grpc.stream_stream_rpc_method_handler(answer, lambda body: "parsed")
    wrapped: Any = Interceptor(metrics, Principals()).wrap(handler, STEP_STREAM)
    context: Any = Context()
    context.read = read
    responses = wrapped.stream_stream(None, context)
    answering = asyncio.create_task(anext(responses))
    await until(lambda: is_waiting)
    assert watched() is None
    context.may_end.set()
    assert await answering == b"answer"
    await responses.aclose()


@pytest.mark.parametrize(("method", "number"), [(STEP, 0), ("/grpc.health.v1.Health/Check", None)])
async def test_a_call_that_has_to_wait_for_its_turn_does_not_reach_its_handler(method: str, number: int | None) -> None:
    layers, health = layer_service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR
    metrics = Metrics([layers.services_by_name["LayerService"], health.services_by_name["Health"]])
    waits_s, seen, asked = [0.0, 600.0], list[Any](), list[int | None]()

    def wait_s(principal: int | None) -> float:
        asked.append(principal)
        return waits_s.pop(0)

    turns: Any = SimpleNamespace(wait_s=wait_s)

    async def answer(message: Any, context: Any) -> bytes:
        seen.append(message)
        return b""

    handler: Any = grpc.unary_unary_rpc_method_handler(answer)
    wrapped: Any = Interceptor(metrics, Principals(), turns=turns).wrap(handler, method)
    assert await wrapped.unary_unary(b"first", Context()) == b""
    waiting = asyncio.create_task(wrapped.unary_unary(b"second", Context()))
    await asyncio.sleep(0.01)
    assert (waits_s, seen, asked) == ([], [b"first"], [number] * 2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert seen == [b"first"]


async def test_each_question_of_reflection_has_a_turn() -> None:
    metrics = Metrics([reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]])
    waits_s, bodies = [0.0, 600.0], [b"1", b"2"]
    turns: Any = SimpleNamespace(wait_s=lambda number: waits_s.pop(0))

    async def answers(messages: Any, context: Any) -> Any:
        async for message in messages:
            yield message

    async def read() -> bytes:
        return bodies.pop(0)

    handler: Any = grpc.stream_stream_rpc_method_handler(answers)
    wrapped: Any = Interceptor(metrics, Principals(), turns=turns).wrap(handler, REFLECT)
    context: Any = Context()
    context.read = read
    responses = wrapped.stream_stream(None, context)
    assert await anext(responses) == b"1"
    waiting = asyncio.create_task(anext(responses))
    await until(lambda: not bodies)
    await asyncio.sleep(0.01)
    assert not waits_s and not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await responses.aclose()
