"""A client with gRPC's defaults gets the reply to every step that was applied, whichever way it calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from rigs.layer_calls import detail, reason_of
from rigs.linked import HIDDEN, hidden_link
from rigs.prefill_step import prefill_step
from rigs.ways import Said, grpc_way, link_way

from deltaline import wire
from deltaline.v1 import admin_service_pb2 as admin_pb
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import state_service_pb2 as state_pb
from deltaline_client import AsyncClient, ReplyTooLarge, SequenceState
from deltaline_client._steps import exchange
from deltaline_server.app import Server
from deltaline_server.front import reply_bytes

MOST = 4 << 20
LAYER, STATE = (
    module.DESCRIPTOR.services_by_name[name].methods_by_name
    for module, name in ((pb, "LayerService"), (state_pb, "StateService"))
)
INFO = admin_pb.DESCRIPTOR.services_by_name["AdminService"].methods_by_name["GetServerInfo"]
ROW_BYTES = 4 * HIDDEN


@asynccontextmanager
async def way_to(server: Server, kind: str, options: Any = ()) -> AsyncIterator[Any]:
    """A connection: of gRPC, with its defaults unless options say otherwise, or of the link."""
    if kind == "link":
        async with link_way(server.link.path) as way:
            yield way
    else:
        async with grpc_way(grpc.aio.insecure_channel(server.address, options=options)) as way:
            yield way


async def call(way: Any, method: MethodDescriptor, message: Message) -> Said:
    said: Said = await way.call(method, [message.SerializeToString()], (), 60.0)
    return said


async def step(way: Any, kind: str, request: pb.StepRequest) -> pb.StepResponse | status_pb2.Status:
    """What a step is answered with, of a call or of a stream."""
    if kind != "stream":
        said = await call(way, LAYER["Step"], request)
        return said.status or pb.StepResponse.FromString(said.replies[0])
    said = await call(way, LAYER["StepStream"], pb.StepStreamRequest(correlation_id=2**64 - 1, step=request))
    answer = pb.StepStreamResponse.FromString(said.replies[0])
    return answer.status if answer.HasField("status") else answer.step


async def opened(way: Any, count: int = 1) -> pb.OpenSequencesResponse:
    said = await call(way, LAYER["OpenSequences"], pb.OpenSequencesRequest(count=count))
    return pb.OpenSequencesResponse.FromString(said.replies[0])


@pytest.mark.parametrize("kind", ["unary", "stream", "link"])
async def test_a_step_s_reply_arrives_or_the_step_was_not_applied(
    make_server: Callable[..., Server], link_option: str, kind: str
) -> None:
    async with (
        make_server(max_sequences=4, chunk_tokens=1024, link=link_option) as server,
        way_to(server, kind) as way,
    ):
        begun = await opened(way)
        whole = np.ones((MOST // ROW_BYTES, HIDDEN), np.float32)
        request = prefill_step(begun, wire.encode(whole))
        refused = await step(way, kind, request)
        assert isinstance(refused, status_pb2.Status) and reason_of(refused) == "REPLY_TOO_LARGE"
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        told = detail(refused, error_details_pb2.ErrorInfo).metadata
        asked = pb.DescribeSequencesRequest(server_epoch=begun.server_epoch, sequence=begun.sequence)
        said = await call(way, LAYER["DescribeSequences"], asked)
        [held] = pb.DescribeSequencesResponse.FromString(said.replies[0]).sequences
        assert (held.spans[0].step, held.spans[0].steps_in_flight) == (0, 0)

        too_many = int(told["reply_bytes"]) - int(told["max_reply_bytes"])
        largest = whole[: len(whole) - -(-too_many // ROW_BYTES)]
        assert len(whole) - len(largest) <= 4
        request = prefill_step(begun, wire.encode(largest))
        done = await step(way, kind, request)
        assert isinstance(done, pb.StepResponse) and done.position == [len(largest)]
        assert len(done.hidden.inline) == largest.nbytes > MOST - 4 * ROW_BYTES


@pytest.mark.parametrize("kind", ["unary", "stream", "link"])
async def test_who_says_that_more_is_taken_gets_it(
    make_server: Callable[..., Server], link_option: str, kind: str
) -> None:
    async with (
        make_server(max_sequences=4, chunk_tokens=1024, link=link_option) as server,
        way_to(server, kind, [("grpc.max_receive_message_length", 64 << 20)]) as way,
    ):
        info = admin_pb.GetServerInfoResponse.FromString(
            (await call(way, INFO, admin_pb.GetServerInfoRequest())).replies[0]
        )
        assert info.max_reply_bytes == info.inline_limit_bytes + (1 << 20)
        whole = np.ones((info.inline_limit_bytes // ROW_BYTES, HIDDEN), np.float32)
        request = prefill_step(await opened(way), wire.encode(whole))
        request.max_reply_bytes = info.max_reply_bytes
        done = await step(way, kind, request)
        assert isinstance(done, pb.StepResponse) and len(done.hidden.inline) == whole.nbytes
        # It is no part of what a step is: this is the same one, to whose reply there is no way for it.
        request.max_reply_bytes = 1 << 16
        refused = await step(way, kind, request)
        assert isinstance(refused, status_pb2.Status) and reason_of(refused) == "REPLY_TOO_LARGE"
        request.max_reply_bytes = 64 << 20
        again = await step(way, kind, request)
        assert isinstance(again, pb.StepResponse) and again.outcome == [pb.ROW_OUTCOME_REPLAYED]


async def test_our_client_says_by_itself_what_it_takes(make_server: Callable[..., Server]) -> None:
    async with (
        make_server(max_sequences=4, chunk_tokens=1024) as server,
        AsyncClient(server.address) as client,
        await client.open() as sequence,
    ):
        limits = await client.info()
        hidden = np.ones((limits.inline_limit_bytes // ROW_BYTES, HIDDEN), np.float32)
        assert (await sequence.prefill(hidden)).shape == hidden.shape
        [held] = await client.describe([sequence])
        assert held.spans[0].step == 1, "it was cut"


async def test_by_the_link_our_client_takes_what_no_channel_would(
    make_server: Callable[..., Server], link_option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_MESSAGE_BYTES", 1 << 16)
    hidden = np.ones((2 * (1 << 16) // ROW_BYTES, HIDDEN), np.float32)
    async with make_server(max_sequences=4, link=link_option) as server:
        async with AsyncClient(server.address) as client, await client.open() as sequence:
            assert (await client.info()).is_linked
            assert (await sequence.prefill(hidden)).shape == hidden.shape
        hidden_link(server)
        async with AsyncClient(server.address) as client, await client.open() as sequence:
            with pytest.raises(ReplyTooLarge):
                await sequence.prefill(hidden)


async def test_our_client_asks_about_many_in_several_calls(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_server(max_sequences=600) as server, AsyncClient(server.address) as client:
        sequences = await client.open_many(600)
        monkeypatch.setattr(reply_bytes, "DEFAULT_BYTES", 80_000)  # room for some 260
        assert {one.state for one in await client.describe(sequences)} == {SequenceState.OPEN}
        assert await client.close(sequences) == [SequenceState.CLOSED] * 600


async def test_calls_whose_reply_might_not_fit_do_nothing(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bound is of the call's own reply, here of 1,000 bytes."""
    async with make_server(max_sequences=200, snapshot_lines=64) as server, way_to(server, "unary") as way:
        begun = await opened(way, 64)
        epoch, handles = begun.server_epoch, begun.sequence
        made = await call(
            way,
            STATE["CreateSnapshots"],
            state_pb.CreateSnapshotsRequest(request_id=b"i" * 16, server_epoch=epoch, sequence=handles[:1]),
        )
        [snapshot] = state_pb.CreateSnapshotsResponse.FromString(made.replies[0]).snapshots
        before = server.runtime.table.num_open, server.runtime.table.num_lines_used
        monkeypatch.setattr(reply_bytes, "DEFAULT_BYTES", 1000)
        calls: list[tuple[MethodDescriptor, Message]] = [
            (LAYER["OpenSequences"], pb.OpenSequencesRequest(count=120)),
            (LAYER["DescribeSequences"], pb.DescribeSequencesRequest(server_epoch=epoch, sequence=handles)),
            (
                LAYER["CommitSequences"],
                pb.CommitSequencesRequest(server_epoch=epoch, sequence=handles, step=[1] * 64, accepted=[0] * 64),
            ),
            (
                STATE["ForkSequences"],
                state_pb.ForkSequencesRequest(
                    request_id=b"f" * 16, server_epoch=epoch, sequence=handles[:1], count=100
                ),
            ),
            (
                STATE["CreateSnapshots"],
                state_pb.CreateSnapshotsRequest(request_id=b"c" * 16, server_epoch=epoch, sequence=handles[:8]),
            ),
            (
                STATE["RestoreSequences"],
                state_pb.RestoreSequencesRequest(request_id=b"r" * 16, snapshot_id=[snapshot.snapshot_id] * 8),
            ),
        ]
        for method, message in calls:
            said = await call(way, method, message)
            assert said.status is not None and reason_of(said.status) == "REPLY_TOO_LARGE", method.name
        assert before == (server.runtime.table.num_open, server.runtime.table.num_lines_used)
