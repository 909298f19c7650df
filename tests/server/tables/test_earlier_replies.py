"""Replies of streamed prefills: found again by a client that lost its connection, bounded, given up first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.layer_calls import HIDDEN, make_step, reason_of

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_server.app import Server
from deltaline_server.runtime import MAX_STEPS_IN_FLIGHT
from deltaline_server.tables.kept_replies import KEPT_STEPS, EarlierReplies, PrefillAnswer

TOKENS = 3


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return layer_service_pb2_grpc.LayerServiceStub(channel)


def chunk(opened: pb.OpenSequencesResponse, number: int) -> pb.StepRequest:
    """A step of a streamed prefill."""
    hidden = np.random.default_rng(number).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    return make_step(
        opened,
        number,
        rows=slice(0, 1),
        kind=[pb.ROW_KIND_PREFILL],
        position=[(number - 1) * TOKENS],
        query_start_loc=[0, TOKENS],
        hidden=wire.encode(hidden),
    )


async def test_the_last_prefill_steps_are_replayed(server: Server, stub: Any) -> None:
    assert KEPT_STEPS >= MAX_STEPS_IN_FLIGHT
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    first = [await stub.Step(chunk(opened, number)) for number in range(1, KEPT_STEPS + 2)]
    again = [await stub.Step(chunk(opened, number)) for number in range(1, KEPT_STEPS + 2)]
    assert reason_of(again[0].row_status[0].status) == "STEP_STALE"
    for one, other in zip(first[1:], again[1:], strict=True):
        assert list(other.outcome) == [pb.ROW_OUTCOME_REPLAYED]
        assert (one.hidden, one.position) == (other.hidden, other.position)
    changed = chunk(opened, 5)
    changed.hidden.CopyFrom(wire.encode(np.zeros((TOKENS, HIDDEN), np.float32)))
    assert reason_of((await stub.Step(changed)).row_status[0].status) == "STEP_STALE"


async def test_a_decode_ends_them(server: Server, stub: Any) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    for number in (1, 2):
        await stub.Step(chunk(opened, number))
    held = server.runtime.scheduler.load().reply_bytes
    await stub.Step(make_step(opened, 3, position=[2 * TOKENS]))
    assert server.runtime.table.replies.earlier.used_bytes == 0 < held - server.runtime.scheduler.load().reply_bytes
    assert reason_of((await stub.Step(chunk(opened, 1))).row_status[0].status) == "STEP_STALE"


async def test_they_end_with_the_sequence(server: Server, stub: Any) -> None:
    opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
    await stub.Step(chunk(opened, 1))
    assert server.runtime.table.replies.earlier.used_bytes > 0
    await stub.CloseSequences(pb.CloseSequencesRequest(server_epoch=opened.server_epoch, sequence=opened.sequence))
    assert server.runtime.scheduler.load().reply_bytes == 0


async def test_they_stay_within_the_budget_and_are_given_up_first(make_server: Callable[..., Server]) -> None:
    limit = 5 * TOKENS * HIDDEN * 4
    async with make_server(reply_bytes=limit) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        for _ in range(3):
            opened = await stub.OpenSequences(pb.OpenSequencesRequest(count=1))
            for number in range(1, 7):
                answer = await stub.Step(chunk(opened, number))
                assert list(answer.outcome) == [pb.ROW_OUTCOME_EXECUTED]
                assert server.runtime.scheduler.load().reply_bytes <= limit
            assert list((await stub.Step(chunk(opened, 6))).outcome) == [pb.ROW_OUTCOME_REPLAYED]
            await stub.CloseSequences(
                pb.CloseSequencesRequest(server_epoch=opened.server_epoch, sequence=opened.sequence)
            )


def test_the_longest_unused_are_given_up_first() -> None:
    replies = EarlierReplies(max_steps=8)
    outputs = np.zeros((1, 4), np.float32)
    request: Any = type("Request", (), {"hidden": outputs})()
    for slot, step in ((0, 1), (1, 1), (0, 2)):
        replies.add(0, slot, PrefillAnswer(step, request, outputs, step), 1000)
    replies.give_up(1)
    assert replies.get(0, 0, 1) and replies.get(0, 0, 2) and not replies.get(0, 1, 1)
