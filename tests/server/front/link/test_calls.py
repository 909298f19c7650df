"""Calls over the link: the same messages, statuses and metrics as over gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2
from rigs.raw_link import RawLink

from deltaline import link, wire
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.app import Server
from deltaline_server.front.layer_service import NAME as LAYERS

ADMIN = "/deltaline.v1.AdminService/"
LAYER = f"/{LAYERS}/"
HIDDEN = 32


def step(epoch: int, handle: int, number: int = 1, tokens: int = 1) -> pb.StepRequest:
    """A prefill of one sequence."""
    return pb.StepRequest(
        server_epoch=epoch,
        sequence=[handle],
        kind=[pb.ROW_KIND_PREFILL],
        step=[number],
        position=[0],
        accepted=[-1],
        query_start_loc=[0, tokens],
        hidden=wire.encode(np.ones((tokens, HIDDEN), dtype=np.float32)),
    )


async def open_one(raw: RawLink) -> pb.OpenSequencesResponse:
    return pb.OpenSequencesResponse.FromString(
        await raw.call(LAYER + "OpenSequences", pb.OpenSequencesRequest(count=1).SerializeToString())
    )


async def test_a_call_has_the_answer_that_grpc_has(raw: RawLink, channel: grpc.aio.Channel) -> None:
    by_link = await raw.call(ADMIN + "GetServerInfo")
    method: Any = channel.unary_unary(ADMIN + "GetServerInfo")
    by_grpc = await method(b"")
    assert admin.GetServerInfoResponse.FromString(by_link) == admin.GetServerInfoResponse.FromString(by_grpc)


async def test_a_step_runs_once_and_its_repeat_is_replayed(raw: RawLink, server: Server) -> None:
    opened = await open_one(raw)
    body = step(opened.server_epoch, opened.sequence[0]).SerializeToString()
    first = pb.StepResponse.FromString(await raw.call(LAYER + "Step", body))
    again = pb.StepResponse.FromString(await raw.call(LAYER + "Step", body))
    assert list(first.outcome) == [pb.ROW_OUTCOME_EXECUTED] and list(again.outcome) == [pb.ROW_OUTCOME_REPLAYED]
    assert first.hidden.inline and first.hidden == again.hidden
    rpc = server.metrics.registry
    labels = {"grpc_type": "unary", "grpc_service": LAYERS, "grpc_method": "Step"}
    assert rpc.get_sample_value("grpc_server_handled_total", labels | {"grpc_code": "OK"}) == 2


async def test_a_refusal_is_the_status_that_grpc_sends(raw: RawLink, server: Server) -> None:
    await raw.begin(LAYER + "OpenSequences", pb.OpenSequencesRequest(count=10_000).SerializeToString())
    packet = await raw.receive()
    assert packet is not None
    info = error_details_pb2.ErrorInfo()
    assert packet.status.code == code_pb2.INVALID_ARGUMENT and packet.status.details[0].Unpack(info)
    assert info.reason == "INVALID_REQUEST"
    refused = {"reason": "INVALID_REQUEST"}
    assert server.metrics.registry.get_sample_value("deltaline_refused_total", refused) == 1


@pytest.mark.parametrize("method", ["/deltaline.v1.LayerService/Fly", "x", "", "/\0"])
async def test_an_unknown_method_is_unimplemented_and_others_go_on(raw: RawLink, method: str) -> None:
    await raw.begin(method)
    packet = await raw.receive()
    assert packet is not None and packet.status.code == code_pb2.UNIMPLEMENTED
    assert await raw.call(ADMIN + "GetServerInfo")


async def test_health_answers_and_watches(raw: RawLink) -> None:
    assert await raw.call("/grpc.health.v1.Health/Check")
    number = await raw.begin("/grpc.health.v1.Health/Watch")
    first = await raw.receive()
    assert first is not None and (first.kind, first.envelope.call) == (link.MESSAGE, number)
    await raw.send(link.pack(link.CANCEL, number))
    ended = await raw.receive()
    assert ended is not None and (ended.envelope.call, ended.status.code) == (number, code_pb2.CANCELLED)
    assert await raw.call("/grpc.health.v1.Health/Check")


async def test_a_stream_answers_each_step_and_ends_in_order(raw: RawLink) -> None:
    opened = await open_one(raw)
    messages = [
        pb.StepStreamRequest(correlation_id=i, step=step(opened.server_epoch, opened.sequence[0], i, 1)) for i in (1, 2)
    ]
    messages[1].step.position[0] = 1
    number = await raw.begin(LAYER + "StepStream", messages[0].SerializeToString(), flags=0)
    await raw.send(link.pack(link.MESSAGE, number, flags=link.LAST) + messages[1].SerializeToString())
    answers = [await raw.receive() for _ in range(3)]
    bodies = [pb.StepStreamResponse.FromString(one.body) for one in answers[:2] if one is not None]
    assert [one.correlation_id for one in bodies] == [1, 2]
    assert all(list(one.step.outcome) == [pb.ROW_OUTCOME_EXECUTED] for one in bodies)
    assert answers[2] is not None and answers[2].status.code == 0
