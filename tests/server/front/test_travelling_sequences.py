"""ExportState and ImportState of sequences over a real channel: what they say, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.layer_calls import HIDDEN, make_step, reason_of, refused, status_of, streamed
from rigs.principals import entry, headers, write_principals

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import state_service_pb2 as pb
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline.v1.state_service_pb2_grpc import StateServiceStub
from deltaline_server.app import Server

ID = b"i" * 16


@pytest.fixture
async def server(make_server: Callable[..., Server]) -> AsyncIterator[Server]:
    async with make_server(host_state_bytes=1 << 22) as server:
        yield server
        host = server.runtime.tiers.host
        assert host is not None and host.used_bytes == 0, "nothing is left of what travelled"
        host.check_integrity()
        server.runtime.states.snapshots.check_integrity()


@pytest.fixture
def state(channel: grpc.aio.Channel) -> Any:
    return StateServiceStub(channel)


async def stepped(stub: Any, **fields: Any) -> Any:
    """A sequence that has stepped, at last by a verify of 4 tokens."""
    opened = await stub.OpenSequences(layers.OpenSequencesRequest(count=1), **fields)
    for step in (1, 2, 3):
        await stub.Step(make_step(opened, step), **fields)
    await stub.Step(verify_of(opened, 4), **fields)
    return opened


def verify_of(opened: Any, step: int) -> layers.StepRequest:
    hidden = np.random.default_rng(step).standard_normal((4, HIDDEN)).astype(np.float32)
    kind = [layers.ROW_KIND_VERIFY]
    return make_step(opened, step, kind=kind, query_start_loc=[0, 4], hidden=wire.encode(hidden))


async def export(state: Any, opened: Any, **options: Any) -> bytes:
    request = pb.ExportStateRequest(server_epoch=opened.server_epoch, sequence=opened.sequence[0])
    return b"".join([one.chunk async for one in state.ExportState(request, **options)])


def messages(content: bytes, cut: int = 10_000, **fields: Any) -> Iterator[pb.ImportStateRequest]:
    values: dict[str, Any] = {"request_id": ID, "sequence": True}
    yield pb.ImportStateRequest(**(values | fields))
    for at in range(0, len(content), cut):
        yield pb.ImportStateRequest(chunk=content[at : at + cut])


def as_opened(response: pb.ImportStateResponse) -> layers.OpenSequencesResponse:
    return layers.OpenSequencesResponse(
        server_epoch=response.server_epoch, sequence=[response.sequence.sequence], lease_ms=response.lease_ms
    )


async def test_an_import_opens_a_sequence_that_goes_on_as_the_other_stood(
    stub: Any, state: Any, make_server: Callable[..., Server]
) -> None:
    opened = await stepped(stub)
    content = await export(state, opened)
    last, following = verify_of(opened, 4), make_step(opened, 5, position=[5], accepted=[2])
    replies = [await stub.Step(one) for one in (last, following)]
    async with (
        make_server(host_state_bytes=1 << 22) as other,
        grpc.aio.insecure_channel(other.address) as channel,
    ):
        came = await streamed(StateServiceStub(channel).ImportState, messages(content, lease_ms=40_000))
        told, served = came.sequence, other.runtime.table
        assert (came.server_epoch, came.lease_ms) == (served.server_epoch, 40_000) and not came.HasField("snapshot")
        assert told.state == layers.SEQUENCE_STATE_OPEN and 30_000 < told.lease_remaining_ms <= 40_000
        assert list(told.spans) == [layers.SpanProgress(step=4, position=3, pending_tokens=4)]
        again: Any = LayerServiceStub(channel)
        child = as_opened(came)
        for request, reply, outcome in zip((last, following), replies, ("REPLAYED", "EXECUTED"), strict=True):
            request.server_epoch, request.sequence[0] = child.server_epoch, child.sequence[0]
            answer = await again.Step(request)
            assert layers.RowOutcome.Name(answer.outcome[0]) == f"ROW_OUTCOME_{outcome}"
            assert (answer.hidden, answer.position) == (reply.hidden, reply.position)
        assert (await StateServiceStub(channel).ListSnapshots(pb.ListSnapshotsRequest())).snapshots == []


async def test_an_import_that_is_sent_again_opens_one_sequence(stub: Any, state: Any, server: Server) -> None:
    content = await export(state, await stepped(stub))
    both = await asyncio.gather(*(streamed(state.ImportState, messages(content, 500)) for _ in range(3)))
    assert all(one == both[0] for one in both) and await streamed(state.ImportState, messages(content)) == both[0]
    assert server.runtime.table.num_open == 2
    other = await streamed(state.ImportState, messages(content, request_id=b"j" * 16))
    assert other.sequence.sequence != both[0].sequence.sequence


async def test_what_can_not_be_asked_of_a_sequence_is_refused(stub: Any, state: Any, server: Server) -> None:
    opened = await stepped(stub)
    epoch, [handle] = opened.server_epoch, opened.sequence
    for fields, reason in (
        ({"server_epoch": epoch, "sequence": handle, "snapshot_id": bytes(16)}, "INVALID_REQUEST"),
        ({"sequence": handle}, "INVALID_REQUEST"),
        ({"server_epoch": epoch}, "SEQUENCE_UNKNOWN"),
        ({"server_epoch": epoch, "sequence": handle ^ 1 << 30}, "SEQUENCE_UNKNOWN"),
        ({"server_epoch": epoch ^ 1, "sequence": handle}, "STATE_LOST"),
    ):
        error = await refused(state.ExportState(pb.ExportStateRequest(**fields)).read())
        assert reason_of(status_of(error)) == reason, fields
    assert server.metrics.registry.get_sample_value("deltaline_unknown_handles_total") == 2
    whole = await export(state, opened)
    for content, fields, reason in (
        (whole, {"pinned": True}, "INVALID_REQUEST"),
        (whole, {"sequence": False}, "INVALID_REQUEST"),
        (whole, {"lease_ms": 1 << 50}, "INVALID_REQUEST"),
        (whole[:-1], {}, "STATE_DAMAGED"),
    ):
        error = await refused(streamed(state.ImportState, messages(content, **fields)))
        assert reason_of(status_of(error)) == reason, fields
    assert server.runtime.table.num_open == 1


async def test_an_epoch_goes_before_the_name_of_another_server(stub: Any, state: Any) -> None:
    opened = await stepped(stub)
    by_name = {"metadata": (("deltaline-server", "another:1"),)}
    assert await export(state, opened, **by_name)
    for fields in (
        {"snapshot_id": bytes(16)},
        {"server_epoch": opened.server_epoch ^ 1, "sequence": opened.sequence[0]},
    ):
        error = await refused(state.ExportState(pb.ExportStateRequest(**fields), **by_name).read())
        assert reason_of(status_of(error)) == "STATE_ELSEWHERE"


async def test_another_s_sequence_can_not_be_exported_and_an_import_is_the_caller_s(
    make_server: Callable[..., Server], tmp_path: Path
) -> None:
    principals = write_principals(tmp_path / "p.toml", entry("a", "step"), entry("b", "step", quotas={"sequences": 1}))
    audit = tmp_path / "audit.jsonl"
    async with (
        make_server(principals=principals, audit_log=str(audit), host_state_bytes=1 << 22) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = LayerServiceStub(channel)
        state: Any = StateServiceStub(channel)
        a, b = ({"metadata": headers(name)} for name in "ab")
        opened = await stepped(stub, **a)
        error = await refused(export(state, opened, **b))
        assert reason_of(status_of(error)) == "SEQUENCE_UNKNOWN"
        content = await export(state, opened, **a)
        came = await streamed(state.ImportState, messages(content), **b)
        describe = layers.DescribeSequencesRequest(server_epoch=came.server_epoch, sequence=[came.sequence.sequence])
        of_b, of_a = [(await stub.DescribeSequences(describe, **one)).sequences[0] for one in (b, a)]
        assert (of_b.state, of_a.state) == (layers.SEQUENCE_STATE_OPEN, layers.SEQUENCE_STATE_UNKNOWN)
        error = await refused(streamed(state.ImportState, messages(content, request_id=b"j" * 16), **b))
        assert reason_of(status_of(error)) == "QUOTA_EXCEEDED"
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    did = [(one["message"], one["principal"], one.get("sequences")) for one in lines if one["message"] != "refused"]
    assert did == [("opened", "a", None), ("exported", "a", 1), ("imported", "b", 1)]
