"""A call that means another server than the one it comes to is told so, whatever way it comes."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from rigs.layer_calls import detail
from rigs.ways import Said, Way, grpc_way, link_way

from deltaline import wire
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import state_service_pb2 as states
from deltaline_server.app import Server

NAME, OTHER = "a.example:50051", "b.example:50051"
LOST, ELSEWHERE = layers.SEQUENCE_STATE_LOST, layers.SEQUENCE_STATE_ELSEWHERE
METHODS = {
    method.name: method
    for module in (layers, states, admin)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
ID = b"i" * 16


class Caller:
    """Calls methods by one way, with the name of a server or none."""

    def __init__(self, way: Way) -> None:
        self._way = way

    async def call(self, name: str, request: Any, server: str | None = None) -> Said:
        method: MethodDescriptor = METHODS[name]
        # The affinity is nothing to the server, whatever it is.
        metadata = [("deltaline-affinity", "any"), *([] if server is None else [("deltaline-server", server)])]
        return await self._way.call(method, [request.SerializeToString()], metadata, 60.0)

    async def ok(self, name: str, request: Any, server: str | None = None) -> Any:
        said = await self.call(name, request, server)
        assert said.code is grpc.StatusCode.OK, said
        return GetMessageClass(METHODS[name].output_type).FromString(b"".join(said.replies))

    async def reason(self, name: str, request: Any, server: str | None = None) -> str:
        said = await self.call(name, request, server)
        return "" if said.status is None else str(detail(said.status, error_details_pb2.ErrorInfo).reason)


@pytest.fixture(params=["core", "front end", "link"])
async def caller(
    request: pytest.FixtureRequest, make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Caller]:
    """By each way to a server of the name NAME."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the front end
    options: dict[str, Any] = {"front_ends": int(request.param == "front end"), "link": "off"}
    if request.param == "link":
        options["link"] = str(tmp_path / "run" / "link.sock")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(make_server(advertise=NAME, **options))
        opened = link_way(server.link.path) if server.link.path else grpc_way(grpc.aio.insecure_channel(server.address))
        yield Caller(await stack.enter_async_context(opened))


def step_of(opened: Any, epoch: int) -> layers.StepRequest:
    return layers.StepRequest(
        server_epoch=epoch,
        sequence=opened.sequence[:1],
        kind=[layers.ROW_KIND_DECODE],
        step=[1],
        position=[0],
        query_start_loc=[0, 1],
        hidden=wire.encode(np.zeros((1, 64), np.float32)),
    )


async def row_reasons(caller: Caller, opened: Any, epoch: int, server: str | None) -> list[str]:
    """Why a step, one on a stream and a commit do nothing, "" where they do not say."""
    step = step_of(opened, epoch)
    commit = layers.CommitSequencesRequest(server_epoch=epoch, sequence=step.sequence, step=[1], accepted=[0])
    answers = [
        await caller.ok("Step", step, server),
        (await caller.ok("StepStream", layers.StepStreamRequest(step=step), server)).step,
        await caller.ok("CommitSequences", commit, server),
    ]
    rows = [answer.row_status for answer in answers]
    return ["".join(detail(row.status, error_details_pb2.ErrorInfo).reason for row in each) for each in rows]


async def sequence_states(caller: Caller, opened: Any, epoch: int, server: str | None) -> list[int]:
    """What is said of a sequence that is described, renewed and closed."""
    handles = {"server_epoch": epoch, "sequence": opened.sequence[:1]}
    described = await caller.ok("DescribeSequences", layers.DescribeSequencesRequest(**handles), server)
    renewed = await caller.ok("RenewLeases", layers.RenewLeasesRequest(**handles), server)
    closed = await caller.ok("CloseSequences", layers.CloseSequencesRequest(**handles), server)
    return [described.sequences[0].state, renewed.state[0], closed.state[0]]


@pytest.mark.parametrize("device", ["cpu"])
async def test_a_sequence_of_another_epoch_is_elsewhere_where_another_server_is_meant_else_lost(
    caller: Caller,
) -> None:
    opened = await caller.ok("OpenSequences", layers.OpenSequencesRequest(count=1))
    other_epoch = opened.server_epoch ^ 1
    for server, state, reason in (
        (OTHER, ELSEWHERE, "STATE_ELSEWHERE"),
        (NAME, LOST, "STATE_LOST"),
        (None, LOST, "STATE_LOST"),
    ):
        assert await sequence_states(caller, opened, other_epoch, server) == [state] * 3
        assert await row_reasons(caller, opened, other_epoch, server) == [reason] * 3
        handles = {"request_id": ID, "server_epoch": other_epoch, "sequence": opened.sequence[:1]}
        assert await caller.reason("ForkSequences", states.ForkSequencesRequest(count=1, **handles), server) == reason
        assert await caller.reason("CreateSnapshots", states.CreateSnapshotsRequest(**handles), server) == reason
    # Nothing was done, and the process answers for what it holds, whatever name it is called by.
    assert await row_reasons(caller, opened, opened.server_epoch, OTHER) == ["", "", "NOTHING_TO_COMMIT"]
    closed = [layers.SEQUENCE_STATE_OPEN, layers.SEQUENCE_STATE_OPEN, layers.SEQUENCE_STATE_CLOSED]
    assert await sequence_states(caller, opened, opened.server_epoch, OTHER) == closed


@pytest.mark.parametrize("device", ["cpu"])
async def test_a_call_that_has_no_epoch_is_refused_where_another_server_is_meant(caller: Caller) -> None:
    calls = [
        ("OpenSequences", layers.OpenSequencesRequest(count=1)),
        ("RestoreSequences", states.RestoreSequencesRequest(request_id=ID, snapshot_id=[ID])),
        ("ReleaseSnapshots", states.ReleaseSnapshotsRequest(request_id=ID, snapshot_id=[ID])),
        ("GetServerInfo", admin.GetServerInfoRequest()),
        ("GetLoad", admin.GetLoadRequest()),
        ("Drain", admin.DrainRequest()),
    ]
    for name, request in calls:
        assert await caller.reason(name, request, OTHER) == "STATE_ELSEWHERE"
    load = await caller.ok("GetLoad", admin.GetLoadRequest(), NAME)
    assert (load.sequences_open, load.draining) == (0, False)


@pytest.mark.parametrize("device", ["cpu"])
async def test_who_opens_is_told_the_name(caller: Caller) -> None:
    opened = await caller.ok("OpenSequences", layers.OpenSequencesRequest(count=1))
    handles = {"request_id": ID, "server_epoch": opened.server_epoch, "sequence": opened.sequence}
    forked = await caller.ok("ForkSequences", states.ForkSequencesRequest(count=1, **handles))
    made = await caller.ok("CreateSnapshots", states.CreateSnapshotsRequest(**handles))
    ids = [one.snapshot_id for one in made.snapshots]
    restored = await caller.ok(
        "RestoreSequences", states.RestoreSequencesRequest(request_id=b"j" * 16, snapshot_id=ids)
    )
    listed = await caller.ok("ListSnapshots", states.ListSnapshotsRequest())
    info = await caller.ok("GetServerInfo", admin.GetServerInfoRequest())
    told = {(each.server_epoch, each.server) for each in (opened, forked, restored, listed, info)}
    assert told == {(opened.server_epoch, NAME)}


@pytest.mark.parametrize("device", ["cpu"])
async def test_a_server_on_loopback_has_no_name_and_is_nobody_elses(make_server: Callable[..., Server]) -> None:
    async with (
        make_server(link="off") as server,
        grpc_way(grpc.aio.insecure_channel(server.address)) as way,
    ):
        caller = Caller(way)
        opened = await caller.ok("OpenSequences", layers.OpenSequencesRequest(count=1))
        assert opened.server == ""
        assert await sequence_states(caller, opened, opened.server_epoch ^ 1, NAME) == [ELSEWHERE] * 3
