"""StateService over a real channel: what calls do and say, what is refused, and that a call sent again does nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from rigs.layer_calls import detail, make_step, reason_of, refused, status_of
from rigs.principals import entry, headers, write_principals
from rigs.until import until
from rigs.watched_states import WatchedStates

from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import prefix_pb2 as prefix
from deltaline.v1 import state_service_pb2 as pb
from deltaline.v1.admin_service_pb2_grpc import AdminServiceStub
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline.v1.state_service_pb2_grpc import StateServiceStub
from deltaline_server.app import Server
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front import requests

MAX_SEQUENCES = 8
_ids = count(1)


@pytest.fixture
async def server(watched: None, make_server: Callable[..., Server]) -> AsyncIterator[Server]:
    async with make_server(spans="0:1,1:2", max_sequences=MAX_SEQUENCES) as server:
        yield server


@pytest.fixture
def states(server: Server) -> WatchedStates:
    kept = server.runtime.states
    assert isinstance(kept, WatchedStates)
    return kept


@pytest.fixture
def state(channel: grpc.aio.Channel) -> Any:
    return StateServiceStub(channel)


def new_id() -> bytes:
    return next(_ids).to_bytes(16, "big")


async def opened_at(stub: Any, position: int, num: int = 1) -> layers.OpenSequencesResponse:
    """Sequences that have done so many decodes on both spans."""
    opened: layers.OpenSequencesResponse = await stub.OpenSequences(layers.OpenSequencesRequest(count=num))
    for step in range(1, position + 1):
        for span in (0, 1):
            await stub.Step(make_step(opened, step, span=span))
    return opened


def fork(opened: Any, num: int = 1, **changes: Any) -> pb.ForkSequencesRequest:
    values = {"server_epoch": opened.server_epoch, "sequence": opened.sequence, "count": num, "request_id": new_id()}
    return pb.ForkSequencesRequest(**(values | changes))


def create(opened: Any, **changes: Any) -> pb.CreateSnapshotsRequest:
    values = {"server_epoch": opened.server_epoch, "sequence": opened.sequence, "request_id": new_id()}
    return pb.CreateSnapshotsRequest(**(values | changes))


def restore(*ids: bytes, **changes: Any) -> pb.RestoreSequencesRequest:
    return pb.RestoreSequencesRequest(**({"snapshot_id": ids, "request_id": new_id()} | changes))


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_children_begin_where_their_parents_are(stub: Any, state: Any, server: Server) -> None:
    one, other = await opened_at(stub, 2), await opened_at(stub, 1)
    both = [*one.sequence, *other.sequence]
    reply = await state.ForkSequences(fork(one, 2, sequence=both, lease_ms=30_000))
    assert (len(set(reply.sequence) | set(both)), list(reply.position), reply.lease_ms) == (6, [2, 1], 30_000)
    assert reply.server_epoch == one.server_epoch
    names = {"server_epoch": reply.server_epoch, "sequence": reply.sequence}
    told = (await stub.DescribeSequences(layers.DescribeSequencesRequest(**names))).sequences
    spans = [[(span.step, span.position) for span in child.spans] for child in told]
    assert spans == [[(0, 2)] * 2] * 2 + [[(0, 1)] * 2] * 2
    child = layers.OpenSequencesResponse(server_epoch=reply.server_epoch, sequence=reply.sequence[:1])
    answer = await stub.Step(make_step(child, 1, position=[2]))
    assert (list(answer.outcome), list(answer.position)) == ([layers.ROW_OUTCOME_EXECUTED], [3])
    assert list((await stub.Step(make_step(one, 3))).position) == [3], "the parents go on"


async def test_life_of_a_snapshot(stub: Any, state: Any) -> None:
    opened = await opened_at(stub, 3, num=2)
    made = (await state.CreateSnapshots(create(opened, lease_ms=30_000, pinned=True))).snapshots
    assert len({one.snapshot_id for one in made}) == 2 and all(len(one.snapshot_id) == 16 for one in made)
    for one in made:
        assert (one.position, one.pinned, one.tier) == (3, True, prefix.TIER_DEVICE)
        assert 0 < one.lease_remaining_ms <= 30_000
        assert one.size_bytes > 0 and (one.adapter, one.adapter_hash) == ("", b"") and one.created_ms > 1.7e12
    listed = await state.ListSnapshots(pb.ListSnapshotsRequest())
    ids = sorted(one.snapshot_id for one in made)
    assert ([one.snapshot_id for one in listed.snapshots], listed.has_more) == (ids, False)
    assert 0 < listed.snapshots[0].lease_remaining_ms <= 30_000
    reply = await state.RestoreSequences(restore(ids[0], ids[1], ids[0], lease_ms=40_000))
    assert ([one.position for one in reply.sequences], reply.lease_ms) == ([3, 3, 3], 40_000)
    assert len({one.sequence for one in reply.sequences}) == 3 and reply.server_epoch == opened.server_epoch
    never = bytes(16)
    renew = pb.RenewSnapshotsRequest(request_id=new_id(), snapshot_id=[ids[0], never], lease_ms=50_000)
    assert list((await state.RenewSnapshots(renew)).state) == [pb.SNAPSHOT_STATE_HELD, pb.SNAPSHOT_STATE_UNKNOWN]
    left_ms = [one.lease_remaining_ms for one in (await state.ListSnapshots(pb.ListSnapshotsRequest())).snapshots]
    assert left_ms[0] > 40_000 and left_ms[1] <= 30_000
    for _ in range(2):
        release = pb.ReleaseSnapshotsRequest(request_id=new_id(), snapshot_id=[ids[0], never])
        assert list((await state.ReleaseSnapshots(release)).state) == [
            pb.SNAPSHOT_STATE_RELEASED,
            pb.SNAPSHOT_STATE_UNKNOWN,
        ]
    gone = await refused(state.RestoreSequences(restore(ids[1], ids[0])))
    assert (gone.code(), reason_of(status_of(gone))) == (grpc.StatusCode.NOT_FOUND, "SNAPSHOT_UNKNOWN")
    left = await state.ListSnapshots(pb.ListSnapshotsRequest())
    assert [one.snapshot_id for one in left.snapshots] == ids[1:]


async def test_a_long_list_comes_in_pages(stub: Any, state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = await opened_at(stub, 0, num=5)
    ids = sorted(one.snapshot_id for one in (await state.CreateSnapshots(create(opened))).snapshots)

    async def pages(**asked: Any) -> list[list[bytes]]:
        found, has_more = list[list[bytes]](), True
        while has_more:
            after = found[-1][-1] if found else b""
            page = await state.ListSnapshots(pb.ListSnapshotsRequest(after=after, **asked))
            found.append([one.snapshot_id for one in page.snapshots])
            has_more = page.has_more
            if len(found) == 1:  # the last of a page may be gone by then
                release = pb.ReleaseSnapshotsRequest(request_id=new_id(), snapshot_id=found[-1][-1:])
                await state.ReleaseSnapshots(release)
        return found

    assert await pages(limit=2) == [ids[:2], ids[2:4], ids[4:]]
    monkeypatch.setattr(requests, "MAX_SNAPSHOTS", 3)
    assert await pages() == [[ids[0], *ids[2:4]], ids[4:]]


async def test_an_open_begins_with_a_snapshot(stub: Any, state: Any, states: WatchedStates) -> None:
    opened = await opened_at(stub, 2)
    [made] = (await state.CreateSnapshots(create(opened))).snapshots
    token = bytes(range(16))
    asked = layers.OpenSequencesRequest(count=2, open_token=token, snapshot_id=made.snapshot_id, lease_ms=20_000)
    first, again = await stub.OpenSequences(asked), await stub.OpenSequences(asked)
    assert (len(set(first.sequence)), first.position, first.lease_ms, first.adapter) == (2, 2, 20_000, "")
    assert again == first and states.num_restores == 1
    plain = layers.OpenSequencesRequest(count=2, open_token=token)
    other = layers.OpenSequencesRequest(count=2, open_token=token, snapshot_id=bytes(16))
    for wrong in (plain, other):
        status = status_of(await refused(stub.OpenSequences(wrong)))
        assert reason_of(status) == "INVALID_REQUEST" and status.message.startswith("open_token: ")
    new = layers.OpenSequencesRequest(count=1, snapshot_id=bytes(16))
    assert reason_of(status_of(await refused(stub.OpenSequences(new)))) == "SNAPSHOT_UNKNOWN"
    assert (await stub.OpenSequences(layers.OpenSequencesRequest(count=1))).position == 0
    names = {"server_epoch": first.server_epoch, "sequence": first.sequence[:1]}
    await stub.CloseSequences(layers.CloseSequencesRequest(**names))
    assert reason_of(status_of(await refused(stub.OpenSequences(asked)))) == "SEQUENCE_CLOSED"


async def test_the_server_says_what_it_serves(server: Server, channel: grpc.aio.Channel) -> None:
    stub: Any = AdminServiceStub(channel)
    info = await stub.GetServerInfo(admin.GetServerInfoRequest())
    assert (info.serves_state, info.snapshot_lines) == (True, 2)


# -- once ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ForkSequences", "CreateSnapshots", "RestoreSequences"])
async def test_a_call_sent_again_gets_the_same_reply(stub: Any, state: Any, states: WatchedStates, method: str) -> None:
    opened = await opened_at(stub, 1)
    [held] = (await state.CreateSnapshots(create(opened))).snapshots
    request: Any = {
        "ForkSequences": fork(opened, 2),
        "CreateSnapshots": create(opened),
        "RestoreSequences": restore(held.snapshot_id),
    }[method]
    before = states.num_forks, states.num_creates, states.num_restores
    replies = [await getattr(state, method)(request) for _ in range(3)]
    assert replies[0] == replies[1] == replies[2]
    assert sum((states.num_forks, states.num_creates, states.num_restores)) == sum(before) + 1
    request.lease_ms = 5000
    status = status_of(await refused(getattr(state, method)(request)))
    assert reason_of(status) == "INVALID_REQUEST" and status.message.startswith("request_id: ")
    violations = detail(status, error_details_pb2.BadRequest).field_violations
    assert [one.field for one in violations] == ["request_id"]


async def test_a_renewal_and_a_release_are_done_once(stub: Any, state: Any, states: WatchedStates) -> None:
    opened = await opened_at(stub, 0)
    [made] = (await state.CreateSnapshots(create(opened))).snapshots
    renew = pb.RenewSnapshotsRequest(request_id=new_id(), snapshot_id=[made.snapshot_id], lease_ms=30_000)
    release = pb.ReleaseSnapshotsRequest(request_id=new_id(), snapshot_id=[made.snapshot_id])
    for call in [(state.RenewSnapshots, renew)] * 2 + [(state.ReleaseSnapshots, release)] * 2:
        await call[0](call[1])
    assert (states.snapshots.num_renewals, states.snapshots.num_releases) == (1, 1)
    assert list((await state.RenewSnapshots(renew)).state) == [pb.SNAPSHOT_STATE_HELD], "what it did then"


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_work_that_began_finishes_and_is_kept_for_the_retry(
    stub: Any, state: Any, states: WatchedStates, server: Server, end: str
) -> None:
    request = fork(await opened_at(stub, 1), 2)
    states.may_go_on.clear()
    states.has_begun.clear()
    call = state.ForkSequences(request, timeout=1.0 if end == "deadline" else 60)
    await asyncio.wait_for(states.has_begun.wait(), 60)
    if end == "cancel":
        call.cancel()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call
    joined = state.ForkSequences(request)
    told = {"grpc_type": "unary", "grpc_service": "deltaline.v1.StateService", "grpc_method": "ForkSequences"}
    await until(lambda: server.metrics.registry.get_sample_value("grpc_server_started_total", told) == 2)
    states.may_go_on.set()
    reply = await joined
    assert await state.ForkSequences(request) == reply
    assert (states.num_forks, server.runtime.table.num_open) == (1, 3)


async def test_children_that_end_before_the_reply_are_told_of(
    stub: Any, state: Any, states: WatchedStates, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks, table = states.fork, server.runtime.table

    async def fork_and_end(*arguments: Any, **options: Any) -> Any:
        opened = await forks(*arguments, **options)
        table.close(table.server_epoch, opened.handles)
        return opened

    monkeypatch.setattr(states, "fork", fork_and_end)
    error = await refused(state.ForkSequences(fork(await opened_at(stub, 1))))
    assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.NOT_FOUND, "SEQUENCE_CLOSED")


async def test_what_was_refused_may_be_asked_again(stub: Any, state: Any, states: WatchedStates) -> None:
    request = fork(await opened_at(stub, 1), 2)
    states.refuses = RequestError(Reason.PAGES_EXHAUSTED, "0 pages are free", retry_after_s=0.05)
    error = await refused(state.ForkSequences(request))
    status = status_of(error)
    assert (error.code(), reason_of(status)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "PAGES_EXHAUSTED")
    assert detail(status, error_details_pb2.RetryInfo).retry_delay.nanos == 50_000_000
    assert len((await state.ForkSequences(request)).sequence) == 2


# -- refusals --------------------------------------------------------------------------------------------------------

ID, MANY = bytes(16), [bytes(16)] * (MAX_SEQUENCES + 1)
KEY = bytes(range(16))
PREFIX = prefix.PrefixKeys(key=[KEY, KEY], position=[1, 2], prompt_tokens=3)


def prefix_with(**changes: Any) -> prefix.PrefixKeys:
    """A prompt's keys of which some fields are others."""
    values: dict[str, Any] = {"key": [KEY, KEY], "position": [1, 2], "prompt_tokens": 3}
    return prefix.PrefixKeys(**(values | changes))


BAD_PREFIXES = [
    *((prefix_with(key=[KEY, bytes(n)]), "prefix.key") for n in (0, 15, 65)),
    *((prefix_with(key=[KEY] * n), "prefix.key") for n in (0, 1, 3)),
    (prefix_with(key=[KEY] * 4097, position=range(1, 4098), prompt_tokens=9999), "prefix.key"),
    *((prefix_with(position=wrong), "prefix.position") for wrong in ([0, 1], [1, 1], [2, 1], [1, 4], [1, 2**64 - 1])),
    *((prefix_with(prompt_tokens=n), "prefix.prompt_tokens") for n in (0, 2**40 + 1, 2**64 - 1)),
    (prefix.PrefixKeys(), "prefix.prompt_tokens"),
]

BAD: list[tuple[str, dict[str, Any], str, str]] = [
    *((method, {"request_id": bytes(n)}, "request_id", "INVALID_REQUEST") for method in "FCRNL" for n in (0, 15, 17)),
    *((method, {"server_epoch": 0}, "server_epoch", "INVALID_REQUEST") for method in "FC"),
    *((method, {"sequence": []}, "sequence", "INVALID_BATCH") for method in "FC"),
    *((method, {"sequence": range(1, MAX_SEQUENCES + 2)}, "sequence", "INVALID_BATCH") for method in "FC"),
    *((method, {"sequence": [1, 1]}, "sequence", "DUPLICATE_SEQUENCE") for method in "FC"),
    *((method, {"lease_ms": 2**63}, "lease_ms", "INVALID_REQUEST") for method in "FCRN"),
    *(("F", {"count": n}, "count", "INVALID_REQUEST") for n in (0, MAX_SEQUENCES + 1, 2**32 - 1)),
    ("F", {"count": MAX_SEQUENCES // 2 + 1, "sequence": [1, 2]}, "count", "INVALID_REQUEST"),
    *((method, {"snapshot_id": []}, "snapshot_id", "INVALID_BATCH") for method in "RNL"),
    *((method, {"snapshot_id": [ID, bytes(15)]}, "snapshot_id", "INVALID_REQUEST") for method in "RNL"),
    ("R", {"snapshot_id": MANY}, "snapshot_id", "INVALID_BATCH"),
    *((method, {"snapshot_id": [ID] * 4097}, "snapshot_id", "INVALID_BATCH") for method in "NL"),
    *(("S", {"after": bytes(n)}, "after", "INVALID_REQUEST") for n in (1, 15, 17)),
    ("S", {"limit": 4097}, "limit", "INVALID_REQUEST"),
    ("O", {"snapshot_id": bytes(15)}, "snapshot_id", "INVALID_REQUEST"),
    ("O", {"adapter": "a"}, "adapter", "INVALID_REQUEST"),
    ("O", {"prefix": PREFIX}, "prefix", "INVALID_REQUEST"),
    *((method, {"reuse": 3}, "reuse", "INVALID_REQUEST") for method in "OP"),
    *((method, {"prefix": wrong}, field, "INVALID_REQUEST") for method in "PI" for wrong, field in BAD_PREFIXES),
    ("C", {"prefix_key": [KEY]}, "prefix_key", "INVALID_REQUEST"),
    ("C", {"sequence": [1], "prefix_key": [KEY, KEY]}, "prefix_key", "INVALID_REQUEST"),
    *(("C", {"prefix_key": [KEY, bytes(n)]}, "prefix_key", "INVALID_REQUEST") for n in (1, 15, 65)),
]


async def test_a_bad_field_is_named_and_nothing_is_done(
    stub: Any, state: Any, server: Server, states: WatchedStates
) -> None:
    opened = layers.OpenSequencesResponse(server_epoch=1, sequence=[1, 2])
    wrong = list[object]()
    for method, changes, field, reason in BAD:
        request: Any
        call, request = {
            "F": (state.ForkSequences, fork(opened)),
            "C": (state.CreateSnapshots, create(opened)),
            "R": (state.RestoreSequences, restore(ID)),
            "N": (state.RenewSnapshots, pb.RenewSnapshotsRequest(request_id=ID, snapshot_id=[ID])),
            "L": (state.ReleaseSnapshots, pb.ReleaseSnapshotsRequest(request_id=ID, snapshot_id=[ID])),
            "S": (state.ListSnapshots, pb.ListSnapshotsRequest()),
            "O": (stub.OpenSequences, layers.OpenSequencesRequest(count=1, snapshot_id=ID)),
            "P": (stub.OpenSequences, layers.OpenSequencesRequest(count=1, prefix=PREFIX)),
            "I": (state.FindSnapshots, pb.FindSnapshotsRequest(prefix=PREFIX)),
        }[method]
        for name, value in changes.items():
            request.ClearField(name)
            request.MergeFrom(type(request)(**{name: value}))
        error = await refused(call(request))
        status = status_of(error)
        fields = [one.field for one in detail(status, error_details_pb2.BadRequest).field_violations]
        if (error.code(), reason_of(status), fields) != (grpc.StatusCode.INVALID_ARGUMENT, reason, [field]):
            wrong.append((method, changes, status))
    assert not wrong
    assert (states.num_forks, states.num_creates, states.num_restores) == (0, 0, 0)
    assert (states.snapshots.num_renewals, states.snapshots.num_releases) == (0, 0)
    assert server.runtime.table.num_open == 0


async def test_reasons_have_the_codes_that_clients_know(stub: Any, state: Any, states: WatchedStates) -> None:
    opened = await opened_at(stub, 1)
    lost = layers.OpenSequencesResponse(server_epoch=opened.server_epoch ^ 1, sequence=opened.sequence)
    never = layers.OpenSequencesResponse(server_epoch=opened.server_epoch, sequence=[opened.sequence[0] ^ (1 << 40)])
    for call in (fork, create):
        method = state.ForkSequences if call is fork else state.CreateSnapshots
        for asked, reason in ((lost, "STATE_LOST"), (never, "SEQUENCE_UNKNOWN")):
            error = await refused(method(call(asked)))
            assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.NOT_FOUND, reason)
    for told in (Reason.NO_SNAPSHOT_LINES, Reason.SPANS_UNEVEN, Reason.STATE_NOT_FINITE, Reason.VERIFY_PENDING):
        states.refuses = RequestError(told, "so it is")
        error = await refused(state.CreateSnapshots(create(opened)))
        assert (error.code().value[0], reason_of(status_of(error))) == (told.code, told.name)


async def test_a_drain_opens_no_children(stub: Any, state: Any, server: Server) -> None:
    opened = await opened_at(stub, 1)
    known = fork(opened)
    reply = await state.ForkSequences(known)
    server.runtime.table.is_draining = True
    assert await state.ForkSequences(known) == reply, "it was done before"
    error = await refused(state.ForkSequences(fork(opened)))
    assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_who_guesses_handles_is_slowed(make_server: Callable[..., Server]) -> None:
    # Of so many sequences a request may name that the last one's guesses take seconds to be forgotten.
    async with make_server(max_sequences=512) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = LayerServiceStub(channel)
        state: Any = StateServiceStub(channel)
        opened = await opened_at(stub, 0)
        never = layers.OpenSequencesResponse(server_epoch=opened.server_epoch, sequence=[1 << 40])
        assert reason_of(status_of(await refused(state.ForkSequences(fork(never))))) == "SEQUENCE_UNKNOWN"
        assert server.metrics.registry.get_sample_value("deltaline_unknown_handles_total") == 1
        for first in range(1, 10_000, 512):
            guesses = [number << 24 for number in range(first, first + 512)]
            request = layers.DescribeSequencesRequest(server_epoch=opened.server_epoch, sequence=guesses)
            try:
                await stub.DescribeSequences(request)
            except grpc.aio.AioRpcError:
                break
        for call in (state.ForkSequences(fork(opened)), state.CreateSnapshots(create(opened))):
            assert reason_of(status_of(await refused(call))) == "TOO_MANY_UNKNOWN"


async def test_a_server_that_stops_ends_what_waits(watched: None, make_server: Callable[..., Server]) -> None:
    async with make_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = LayerServiceStub(channel)
        states: Any = server.runtime.states
        opened = await stub.OpenSequences(layers.OpenSequencesRequest(count=1))
        states.may_go_on.clear()
        call = StateServiceStub(channel).ForkSequences(fork(opened))
        await asyncio.wait_for(states.has_begun.wait(), 60)
        server.interrupt()
        server.interrupt()
        await server.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert not [task for task in asyncio.all_tasks() if "RequestIds" in repr(task)]
    assert server.runtime.table.num_open == 1


# -- whose it is -----------------------------------------------------------------------------------------------------


async def test_what_is_anothers_is_what_never_was_and_the_audit_has_who_did_what(
    watched: None, make_server: Callable[..., Server], tmp_path: Path
) -> None:
    file = write_principals(tmp_path / "p.toml", entry("alice", "step"), entry("bob", "step"))
    audit = tmp_path / "audit.jsonl"
    async with (
        make_server(principals=file, audit_log=str(audit)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = LayerServiceStub(channel)
        state: Any = StateServiceStub(channel)
        alice, bob = headers("alice"), headers("bob")
        opened = await stub.OpenSequences(layers.OpenSequencesRequest(count=1), metadata=alice)
        made = (await state.CreateSnapshots(create(opened, pinned=True), metadata=alice)).snapshots[0].snapshot_id
        assert not (await state.ListSnapshots(pb.ListSnapshotsRequest(), metadata=bob)).snapshots
        for one in (made, bytes(16)):
            release = pb.ReleaseSnapshotsRequest(request_id=new_id(), snapshot_id=[one])
            reply = await state.ReleaseSnapshots(release, metadata=bob)
            assert list(reply.state) == [pb.SNAPSHOT_STATE_UNKNOWN]
            texts = {(await refused(state.RestoreSequences(restore(one), metadata=bob))).details()}
        assert len(texts) == 1
        for call in (
            state.ForkSequences(fork(opened), metadata=bob),
            state.CreateSnapshots(create(opened), metadata=bob),
        ):
            assert reason_of(status_of(await refused(call))) == "SEQUENCE_UNKNOWN"
        asked = fork(opened, 2)
        await state.ForkSequences(asked, metadata=alice)
        theirs = fork(opened, 1, request_id=asked.request_id)
        assert reason_of(status_of(await refused(state.ForkSequences(theirs, metadata=bob)))) == "SEQUENCE_UNKNOWN"
        await state.RestoreSequences(restore(made), metadata=alice)
        await state.ReleaseSnapshots(
            pb.ReleaseSnapshotsRequest(request_id=new_id(), snapshot_id=[made]), metadata=alice
        )
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    wanted = ("message", "sequences", "count", "pinned", "snapshots")
    told = [[line[name] for name in wanted if name in line] for line in lines if line["principal"] == "alice"]
    assert told == [
        ["opened", 1],
        ["snapshots made", 1, True],
        ["forked", 1, 2],
        ["restored", 1],
        ["snapshots released", 1],
    ]
    assert made.hex() not in audit.read_text()
