"""What every call about a sequence that was moved is answered, over a real channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from rigs.layer_calls import detail, make_step, reason_of, refused, status_of

from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import state_service_pb2 as state_pb
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline.v1.state_service_pb2_grpc import StateServiceStub
from deltaline_server.app import Server
from deltaline_server.tables.moved import Owner

OWNER = Owner("there:50051", 2**64 - 1, 2**63 + 1)
ID = b"i" * 16


@pytest.fixture
async def server(make_server: Callable[..., Server]) -> AsyncIterator[Server]:
    async with make_server(host_state_bytes=1 << 22) as server:
        yield server


@pytest.fixture
async def moved(server: Server, stub: Any) -> pb.OpenSequencesResponse:
    """Two sequences that have stepped, the second of which was moved then."""
    opened: pb.OpenSequencesResponse = await stub.OpenSequences(pb.OpenSequencesRequest(count=2))
    await stub.Step(make_step(opened, 1))
    table = server.runtime.table
    table.let_go(int(table.lookup(opened.server_epoch, np.array(opened.sequence, np.uint64))[0][1]), OWNER)
    return opened


def owner_told(status: status_pb2.Status) -> dict[str, str]:
    info = detail(status, error_details_pb2.ErrorInfo)
    assert info.reason == "STATE_ELSEWHERE" and status.code == grpc.StatusCode.NOT_FOUND.value[0]
    return dict(info.metadata)


def told(row: int) -> dict[str, str]:
    return {
        "row": str(row),
        "server": OWNER.server,
        "server_epoch": str(OWNER.server_epoch),
        "sequence": str(OWNER.handle),
    }


def rows_told(reply: Any) -> list[dict[str, str]]:
    assert [one.row for one in reply.row_status] == [1]
    return [owner_told(one.status) for one in reply.row_status]


async def test_steps_and_commits_tell_it_by_row(stub: Any, moved: pb.OpenSequencesResponse) -> None:
    step = await stub.Step(make_step(moved, 2))
    assert list(step.outcome) == [pb.ROW_OUTCOME_EXECUTED, pb.ROW_OUTCOME_REFUSED]
    assert rows_told(step) == [told(1)]
    stream = stub.StepStream()
    await stream.write(pb.StepStreamRequest(correlation_id=3, step=make_step(moved, 3)))
    assert rows_told((await stream.read()).step) == [told(1)]
    stream.cancel()
    commit = pb.CommitSequencesRequest(
        server_epoch=moved.server_epoch, sequence=moved.sequence[1:], step=[1], accepted=[1]
    )
    [status] = (await stub.CommitSequences(commit)).row_status
    assert owner_told(status.status) == told(0)


async def test_close_renew_and_describe_tell_it_beside_the_states(stub: Any, moved: pb.OpenSequencesResponse) -> None:
    names: dict[str, Any] = {"server_epoch": moved.server_epoch, "sequence": moved.sequence}
    where = pb.MovedSequence(row=1, server=OWNER.server, server_epoch=OWNER.server_epoch, sequence=OWNER.handle)
    described = await stub.DescribeSequences(pb.DescribeSequencesRequest(**names))
    renewed = await stub.RenewLeases(pb.RenewLeasesRequest(**names))
    closed = await stub.CloseSequences(pb.CloseSequencesRequest(**names))
    assert [list(reply.moved) for reply in (described, renewed, closed)] == [[where]] * 3
    assert [one.state for one in described.sequences] == list(renewed.state)
    assert list(renewed.state) == [pb.SEQUENCE_STATE_OPEN, pb.SEQUENCE_STATE_ELSEWHERE]
    assert list(closed.state) == [pb.SEQUENCE_STATE_CLOSED, pb.SEQUENCE_STATE_ELSEWHERE]
    gone = await stub.CloseSequences(pb.CloseSequencesRequest(**names))
    assert list(gone.moved) == [where], "as often as it is asked"


async def test_calls_for_states_end_with_it(
    channel: grpc.aio.Channel, stub: Any, moved: pb.OpenSequencesResponse
) -> None:
    state, names = StateServiceStub(channel), {"server_epoch": moved.server_epoch, "sequence": moved.sequence}
    fork = state_pb.ForkSequencesRequest(count=1, request_id=ID, **names)  # type: ignore[arg-type]
    create = state_pb.CreateSnapshotsRequest(request_id=ID, **names)  # type: ignore[arg-type]
    for call in (state.ForkSequences(fork), state.CreateSnapshots(create)):
        assert owner_told(status_of(await refused(call))) == told(1)
    one = state_pb.ExportStateRequest(server_epoch=moved.server_epoch, sequence=moved.sequence[1])
    assert owner_told(status_of(await refused(anext(aiter(state.ExportState(one)))))) == told(0)
    assert list((await stub.Step(make_step(moved, 2, slice(1)))).position) == [2], "the other one goes on"


@pytest.mark.parametrize("name", ["here:1", "another:1"])
async def test_the_next_server_of_the_name_tells_it_too(
    make_server: Callable[..., Server], tmp_path: Path, name: str
) -> None:
    options: dict[str, Any] = {
        "host_state_bytes": 1 << 22,
        "state_dir": str(tmp_path / "states"),
        "state_dir_bytes": 1 << 22,
    }
    async with make_server(advertise="here:1", **options) as server:
        table, records = server.runtime.table, server.runtime.mover.records
        opened = pb.OpenSequencesResponse(server_epoch=table.server_epoch, sequence=table.open(2).handles.tolist())
        assert records is not None
        await records.add(table.server_epoch, opened.sequence[1], "anonymous", OWNER, 60.0)
    async with make_server(advertise=name, **options) as after, grpc.aio.insecure_channel(after.address) as channel:
        stub: Any = LayerServiceStub(channel)
        names: dict[str, Any] = {"server_epoch": opened.server_epoch, "sequence": opened.sequence}
        described = await stub.DescribeSequences(pb.DescribeSequencesRequest(**names))
        statuses = [one.status for one in (await stub.Step(make_step(opened, 1))).row_status]
        assert described.sequences[0].state == pb.SEQUENCE_STATE_LOST
        assert reason_of(statuses[0]) == "STATE_LOST"
        if name == "here:1":
            assert described.sequences[1].state == pb.SEQUENCE_STATE_ELSEWHERE
            assert [one.server for one in described.moved] == [OWNER.server]
            assert owner_told(statuses[1]) == told(1)
        else:
            assert not described.moved and reason_of(statuses[1]) == "STATE_LOST"


async def test_who_asks_for_moved_sequences_is_not_slowed(server: Server, stub: Any, moved: Any) -> None:
    close = pb.CloseSequencesRequest(server_epoch=moved.server_epoch, sequence=moved.sequence[1:])
    replies = await asyncio.gather(*(stub.CloseSequences(close) for _ in range(200)))
    assert all(reply.moved for reply in replies)
