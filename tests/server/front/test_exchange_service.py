"""ExportState and ImportState over a real channel: what they say, what is refused, and that streams that stand still or
end leave nothing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from rigs.layer_calls import make_step, reason_of, refused, status_of, streamed
from rigs.principals import entry, headers, write_principals
from rigs.until import until
from server.conftest import SMALL_MODEL

from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import prefix_pb2
from deltaline.v1 import state_service_pb2 as pb
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline.v1.state_service_pb2_grpc import StateServiceStub
from deltaline_server import app
from deltaline_server.app import Server
from deltaline_server.errors import RequestError
from deltaline_server.front.pace import PACE, Pace
from deltaline_server.front.states.state_service import StateService
from deltaline_server.principal import ANONYMOUS
from deltaline_server.snapshots import exchange
from deltaline_server.snapshots.exchange import Exchange
from deltaline_server.snapshots.host import HostTier

ID = b"i" * 16
# Whose states have several pieces.
WIDE_MODEL = SMALL_MODEL | {
    "linear_num_key_heads": 32,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

# gRPC takes no more ahead of a reader than HTTP/2's first window.
NO_AHEAD = [("grpc.http2.bdp_probe", 0)]


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> None:
    """One state at a time may be on its way: what is left of another is noticed."""
    monkeypatch.setattr(exchange, "MOST_ON_THEIR_WAY", 1)


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Pace:
    """The servers' pace, where a test has another than is the default."""
    pace: Pace = getattr(request, "param", PACE)
    monkeypatch.setattr(app, "StateService", partial(StateService, pace=pace))
    return pace


@pytest.fixture
async def server(pace: Pace, make_server: Callable[..., Server]) -> AsyncIterator[Server]:
    async with make_server(host_state_bytes=1 << 22) as server:
        yield server
        host_of(server).check_integrity()
        server.runtime.states.snapshots.check_integrity()


@pytest.fixture
async def wide(pace: Pace, make_server: Callable[..., Server], tmp_path: Path) -> AsyncIterator[Server]:
    path = tmp_path / "wide.json"
    path.write_text(json.dumps(WIDE_MODEL))
    audit = str(tmp_path / "audit.jsonl")
    async with make_server(random_init=str(path), host_state_bytes=1 << 24, audit_log=audit) as server:
        yield server
        host_of(server).check_integrity()


@pytest.fixture
def state(channel: grpc.aio.Channel) -> Any:
    return StateServiceStub(channel)


def host_of(server: Server) -> HostTier:
    host = server.runtime.tiers.host
    assert host is not None
    return host


def exchange_of(server: Server) -> Exchange:
    found = server.runtime.passage.exchange
    assert found is not None
    return found


def has_room_for_one(server: Server) -> bool:
    """Whether a state may be on its way, of as many as may be."""
    with suppress(RequestError), exchange_of(server).on_its_way(ANONYMOUS):
        return True
    return False


async def content_of(server: Server, id: bytes) -> bytes:
    """A state's file, whatever the service's pace is."""
    pieces = exchange_of(server).export(id, ANONYMOUS, pause_s=60.0, whole_s=600.0)
    return b"".join([piece async for piece in pieces])


async def snapshot_of(channel: Any, num_steps: int = 3, **changes: Any) -> tuple[Any, bytes]:
    """A sequence that has stepped, and a snapshot of it."""
    stub: Any = LayerServiceStub(channel)
    opened = await stub.OpenSequences(layers.OpenSequencesRequest(count=1))
    for step in range(1, num_steps + 1):
        await stub.Step(make_step(opened, step))
    names = {"server_epoch": opened.server_epoch, "sequence": opened.sequence, "request_id": os.urandom(16)}
    made = await StateServiceStub(channel).CreateSnapshots(pb.CreateSnapshotsRequest(**names, **changes))
    return opened, made.snapshots[0].snapshot_id


async def export(state: Any, id: bytes, **options: Any) -> list[bytes]:
    return [one.chunk async for one in state.ExportState(pb.ExportStateRequest(snapshot_id=id), **options)]


async def rest_of(chunks: AsyncIterator[Any]) -> None:
    async for _ in chunks:
        pass


def messages(content: bytes, cut: int = 10_000, **fields: Any) -> Iterator[pb.ImportStateRequest]:
    yield pb.ImportStateRequest(**({"request_id": ID} | fields))
    for at in range(0, len(content), cut):
        yield pb.ImportStateRequest(chunk=content[at : at + cut])


async def listed(state: Any) -> list[pb.Snapshot]:
    return list((await state.ListSnapshots(pb.ListSnapshotsRequest())).snapshots)


async def test_an_import_makes_a_snapshot_as_it_is_asked_to(channel: Any, stub: Any, state: Any) -> None:
    opened, id = await snapshot_of(channel)
    content = b"".join(await export(state, id))
    assert content.startswith(b"dl-state")
    came = (await streamed(state.ImportState, messages(content, lease_ms=40_000, pinned=True))).snapshot
    assert came.snapshot_id != id and (came.position, came.pinned, came.tier) == (3, True, prefix_pb2.TIER_HOST)
    assert 30_000 < came.lease_remaining_ms <= 40_000 and came.created_ms > 1.7e12
    assert {one.snapshot_id for one in await listed(state)} == {id, came.snapshot_id}
    restore = pb.RestoreSequencesRequest(request_id=b"r" * 16, snapshot_id=[came.snapshot_id])
    restored = await state.RestoreSequences(restore)
    child = layers.OpenSequencesResponse(
        server_epoch=restored.server_epoch, sequence=[one.sequence for one in restored.sequences]
    )
    step = make_step(opened, 4)
    mine = make_step(child, 1, position=[3], hidden=step.hidden)
    assert (await stub.Step(mine)).hidden == (await stub.Step(step)).hidden


async def test_a_large_state_comes_in_messages_that_any_client_takes(wide: Server) -> None:
    async with grpc.aio.insecure_channel(wide.address) as channel:
        state: Any = StateServiceStub(channel)
        _, id = await snapshot_of(channel)
        chunks = await export(state, id)
        assert sum(map(len, chunks)) > 4 << 20 and max(map(len, chunks)) == 1 << 20
        assert (await streamed(state.ImportState, messages(b"".join(chunks), 1 << 20))).snapshot.position == 3


# -- sent again ------------------------------------------------------------------------------------------------------


async def test_an_import_that_is_sent_again_is_done_once(channel: Any, state: Any, server: Server) -> None:
    _, id = await snapshot_of(channel)
    content = b"".join(await export(state, id))
    both = await asyncio.gather(*(streamed(state.ImportState, messages(content, 500)) for _ in range(3)))
    first = both[0]
    assert all(one == first for one in both)
    assert await streamed(state.ImportState, messages(content)) == first
    assert len(await listed(state)) == 2
    again = await refused(streamed(state.ImportState, messages(content, pinned=True)))
    assert reason_of(status_of(again)) == "INVALID_REQUEST" and "request_id" in str(again.details())
    _, other = await snapshot_of(channel, 2, prefix_key=[b"k" * 16])
    again = await refused(streamed(state.ImportState, messages(b"".join(await export(state, other)))))
    assert reason_of(status_of(again)) == "INVALID_REQUEST", "another state under the same id"
    new = await streamed(state.ImportState, messages(content, request_id=b"j" * 16))
    assert new.snapshot.snapshot_id != first.snapshot.snapshot_id


async def test_one_that_is_sent_again_need_not_be_sent_whole(channel: Any, state: Any) -> None:
    _, id = await snapshot_of(channel)
    content = b"".join(await export(state, id))
    first = await streamed(state.ImportState, messages(content))
    never = asyncio.Event()

    async def only_its_header() -> AsyncIterator[pb.ImportStateRequest]:
        for message in messages(content[:4096]):
            yield message
        await never.wait()

    assert await state.ImportState(only_its_header()) == first


async def test_what_was_refused_may_be_sent_again_whole(channel: Any, state: Any) -> None:
    _, id = await snapshot_of(channel)
    content = b"".join(await export(state, id))
    cut = await refused(streamed(state.ImportState, messages(content[:-1])))
    assert (cut.code(), reason_of(status_of(cut))) == (grpc.StatusCode.DATA_LOSS, "STATE_DAMAGED")
    assert len(await listed(state)) == 1
    assert (await streamed(state.ImportState, messages(content))).snapshot.position == 3


# -- refused ---------------------------------------------------------------------------------------------------------


async def test_a_server_without_host_memory_says_what_it_needs(make_server: Callable[..., Server]) -> None:
    async with make_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        state: Any = StateServiceStub(channel)
        _, id = await snapshot_of(channel)
        for call in (
            streamed(state.ImportState, messages(b"x")),
            state.ExportState(pb.ExportStateRequest(snapshot_id=id)).read(),
        ):
            error = await refused(call)
            assert (error.code(), reason_of(status_of(error))) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "HOST_TIER_OFF",
            )
            assert "--host-state-bytes" in str(error.details())


WRONG = {
    "nothing": [],
    "no id": [pb.ImportStateRequest(chunk=b"x")],
    "a short id": [pb.ImportStateRequest(request_id=b"x" * 15)],
    "a long lease": [pb.ImportStateRequest(request_id=ID, lease_ms=1 << 60)],
    "an empty chunk": [pb.ImportStateRequest(request_id=ID), pb.ImportStateRequest()],
    "its id twice": [pb.ImportStateRequest(request_id=ID), pb.ImportStateRequest(request_id=ID, chunk=b"d")],
    "pinned later": [pb.ImportStateRequest(request_id=ID, chunk=b"d"), pb.ImportStateRequest(pinned=True, chunk=b"l")],
}


@pytest.mark.parametrize("what", WRONG)
async def test_messages_that_are_wrong_are_refused_by_their_field(state: Any, what: str) -> None:
    error = await refused(streamed(state.ImportState, iter(WRONG[what])))
    assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


async def test_an_id_that_is_none_is_refused(state: Any) -> None:
    for id, reason in ((b"", "INVALID_REQUEST"), (b"x" * 15, "INVALID_REQUEST"), (bytes(16), "SNAPSHOT_UNKNOWN")):
        error = await refused(state.ExportState(pb.ExportStateRequest(snapshot_id=id)).read())
        assert reason_of(status_of(error)) == reason


async def test_another_s_snapshot_can_neither_be_exported_nor_told_from_none(
    make_server: Callable[..., Server], tmp_path: Path
) -> None:
    principals = write_principals(
        tmp_path / "p.toml", entry("a", "step"), entry("b", "step", quotas={"snapshots": 1}), entry("c", "admin")
    )
    audit = tmp_path / "audit.jsonl"
    options = {"principals": principals, "audit_log": str(audit), "host_state_bytes": 1 << 22}
    async with make_server(**options) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = LayerServiceStub(channel)
        state: Any = StateServiceStub(channel)
        mine, theirs = {"metadata": headers("a")}, {"metadata": headers("b")}
        opened = await stub.OpenSequences(layers.OpenSequencesRequest(count=1), **mine)
        names = {"server_epoch": opened.server_epoch, "sequence": opened.sequence, "request_id": ID}
        made = (await state.CreateSnapshots(pb.CreateSnapshotsRequest(**names), **mine)).snapshots[0]
        said = set()
        for id in (made.snapshot_id, bytes(16)):
            error = await refused(state.ExportState(pb.ExportStateRequest(snapshot_id=id), **theirs).read())
            said.add((error.code(), error.details(), status_of(error).SerializeToString()))
        assert len(said) == 1
        content = b"".join(await export(state, made.snapshot_id, **mine))
        came = (await streamed(state.ImportState, messages(content), **theirs)).snapshot
        error = await refused(streamed(state.ImportState, messages(content, request_id=b"j" * 16), **theirs))
        assert reason_of(status_of(error)) == "QUOTA_EXCEEDED"
        error = await refused(state.ExportState(pb.ExportStateRequest(snapshot_id=came.snapshot_id), **mine).read())
        assert reason_of(status_of(error)) == "SNAPSHOT_UNKNOWN"
        error = await refused(streamed(state.ImportState, messages(content), metadata=headers("c")))
        assert reason_of(status_of(error)) == "ROLE_MISSING"
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    did = [(one["message"], one["principal"]) for one in lines if one["message"] != "refused"]
    assert did == [("opened", "a"), ("snapshots made", "a"), ("exported", "a"), ("imported", "b")]


# -- streams that stand still or end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", [Pace(pause_s=0.5), Pace(whole_s=0.5)], ids=["one", "all"], indirect=True)
@pytest.mark.parametrize("sent", [0, 100, 4096, 14_000])
async def test_an_import_that_stands_still_is_ended(
    most: None, channel: Any, state: Any, server: Server, sent: int
) -> None:
    _, id = await snapshot_of(channel)
    content = await content_of(server, id)
    host = host_of(server)
    assert len(content) > 14_000
    used_bytes = host.used_bytes

    async def stalling() -> AsyncIterator[pb.ImportStateRequest]:
        for message in messages(content[:sent]):
            yield message
        await asyncio.Event().wait()

    error = await refused(state.ImportState(stalling()))
    assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.DEADLINE_EXCEEDED, "UPLOAD_TIMEOUT")
    assert host.used_bytes == used_bytes and len(await listed(state)) == 1
    await until(lambda: has_room_for_one(server))


async def test_an_import_that_is_cancelled_leaves_nothing(most: None, channel: Any, state: Any, server: Server) -> None:
    _, id = await snapshot_of(channel)
    content = await content_of(server, id)
    host = host_of(server)
    used_bytes = host.used_bytes

    async def stalling() -> AsyncIterator[pb.ImportStateRequest]:
        for message in messages(content[:14_000]):
            yield message
        await asyncio.Event().wait()

    call = state.ImportState(stalling())
    await until(lambda: host.used_bytes > used_bytes)
    assert len(await listed(state)) == 1
    busy = await refused(streamed(state.ImportState, messages(content)))
    assert (busy.code(), reason_of(status_of(busy))) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    call.cancel()
    await until(lambda: host.used_bytes == used_bytes)
    assert (await streamed(state.ImportState, messages(content))).snapshot.position == 3


@pytest.mark.parametrize(
    ("pace", "stands_still"),
    [(Pace(pause_s=0.5), True), (Pace(whole_s=0.5), True), (PACE, False)],
    ids=["one", "all", "cancels"],
    indirect=["pace"],
)
async def test_a_reader_that_stands_still_or_leaves_gives_back_what_it_held_and_is_in_the_audit(
    most: None, wide: Server, tmp_path: Path, stands_still: bool
) -> None:
    async with grpc.aio.insecure_channel(wide.address, options=NO_AHEAD) as channel:
        state: Any = StateServiceStub(channel)
        _, id = await snapshot_of(channel)
        call = state.ExportState(pb.ExportStateRequest(snapshot_id=id))
        chunks = aiter(call)
        await anext(chunks)
        await state.ReleaseSnapshots(pb.ReleaseSnapshotsRequest(request_id=ID, snapshot_id=[id]))
        if not stands_still:
            assert host_of(wide).used_bytes > 0, "it is read"
            call.cancel()
        await until(lambda: not host_of(wide).used_bytes)
        if stands_still:
            error = await refused(rest_of(chunks))
            assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.DEADLINE_EXCEEDED, "UPLOAD_TIMEOUT")
        await until(lambda: has_room_for_one(wide))
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [one["message"] for one in lines].count("exported") == 1
