"""Prompts' keys over a real channel: what is found, what an open begins with, and what a retry of it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from rigs.layer_calls import make_step, reason_of, refused, status_of
from rigs.principals import entry, headers, write_principals

from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import prefix_pb2 as prefix
from deltaline.v1 import state_service_pb2 as pb
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline.v1.state_service_pb2_grpc import StateServiceStub
from deltaline_server.app import Server

ALWAYS, IF_CHEAPER = prefix.REUSE_POLICY_ALWAYS, prefix.REUSE_POLICY_IF_CHEAPER
_ids = count(1)


@pytest.fixture
async def server(make_server: Callable[..., Server]) -> AsyncIterator[Server]:
    async with make_server(spans="0:1,1:2", max_sequences=8, snapshot_lines=4) as server:
        yield server


@pytest.fixture
def state(channel: grpc.aio.Channel) -> Any:
    return StateServiceStub(channel)


def new_id() -> bytes:
    return next(_ids).to_bytes(16, "big")


def key(text: str) -> bytes:
    return text.encode().ljust(32, b".")


def keys(text: str) -> prefix.PrefixKeys:
    """Those of a prompt: one letter is one token."""
    ends = range(1, len(text) + 1)
    return prefix.PrefixKeys(key=[key(text[:end]) for end in ends], position=ends, prompt_tokens=len(text))


def asked(text: str, **more: Any) -> layers.OpenSequencesRequest:
    values: dict[str, Any] = {"count": 1, "prefix": keys(text)}
    return layers.OpenSequencesRequest(**(values | more))


async def stored(stub: Any, state: Any, text: str, **metadata: Any) -> bytes:
    """A snapshot under the key of a prompt, of which only the length counts here."""
    opened = await stub.OpenSequences(layers.OpenSequencesRequest(count=1), **metadata)
    for number in range(1, len(text) + 1):
        for span in (0, 1):
            await stub.Step(make_step(opened, number, span=span), **metadata)
    names = {"server_epoch": opened.server_epoch, "sequence": opened.sequence}
    made = await state.CreateSnapshots(
        pb.CreateSnapshotsRequest(request_id=new_id(), prefix_key=[key(text)], **names), **metadata
    )
    await stub.CloseSequences(layers.CloseSequencesRequest(**names), **metadata)
    found: bytes = made.snapshots[0].snapshot_id
    return found


async def find(state: Any, text: str, **metadata: Any) -> prefix.PrefixMatch:
    reply = await state.FindSnapshots(pb.FindSnapshotsRequest(prefix=keys(text)), **metadata)
    match: prefix.PrefixMatch = reply.match
    return match


# -- finds -----------------------------------------------------------------------------------------------------------


async def test_the_deepest_state_before_the_end_is_found(stub: Any, state: Any) -> None:
    shallow, deep = await stored(stub, state, "ab"), await stored(stub, state, "abc")
    found = await find(state, "abcd")
    assert (found.snapshot_id, found.position, found.tier) == (deep, 3, prefix.TIER_DEVICE)
    assert (found.restore_us, found.miss) == (0, prefix.PREFIX_MISS_UNSPECIFIED)
    assert (await find(state, "abc")).snapshot_id == (await find(state, "abxy")).snapshot_id == shallow
    listed = await state.ListSnapshots(pb.ListSnapshotsRequest())
    assert {one.snapshot_id for one in listed.snapshots} == {shallow, deep}


async def test_a_miss_has_its_reason(stub: Any, state: Any) -> None:
    assert (await find(state, "ab")).miss == prefix.PREFIX_MISS_NEVER_STORED
    held = await stored(stub, state, "ab")
    found = await find(state, "ab")
    assert found == prefix.PrefixMatch(miss=prefix.PREFIX_MISS_TOO_SHORT)
    for name in ("abcd", "abcde", "abcdef", "abcdefg"):
        await stored(stub, state, name)
    left = {one.snapshot_id for one in (await state.ListSnapshots(pb.ListSnapshotsRequest())).snapshots}
    assert held not in left and (await find(state, "abx")).miss == prefix.PREFIX_MISS_EVICTED
    nothing = pb.FindSnapshotsRequest(prefix=prefix.PrefixKeys(prompt_tokens=1))
    assert (await state.FindSnapshots(nothing)).match.miss == prefix.PREFIX_MISS_TOO_SHORT


async def test_an_adapter_is_asked_for_by_name(state: Any) -> None:
    named = pb.FindSnapshotsRequest(prefix=keys("ab"), adapter="none")
    error = await refused(state.FindSnapshots(named))
    assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.FAILED_PRECONDITION, "ADAPTERS_OFF")


async def test_what_is_anothers_is_not_found(make_server: Callable[..., Server], tmp_path: Path) -> None:
    file = write_principals(tmp_path / "p.toml", entry("alice", "step"), entry("bob", "step"))
    async with (
        make_server(spans="0:1,1:2", snapshot_lines=4, principals=file) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = LayerServiceStub(channel)
        state: Any = StateServiceStub(channel)
        alice, bob = headers("alice"), headers("bob")
        await stored(stub, state, "ab", metadata=alice)
        assert (await find(state, "abc", metadata=alice)).position == 2
        assert await find(state, "abc", metadata=bob) == prefix.PrefixMatch(miss=prefix.PREFIX_MISS_NEVER_STORED)
        opened = await stub.OpenSequences(asked("abc"), metadata=bob)
        assert (opened.position, opened.match.miss) == (0, prefix.PREFIX_MISS_NEVER_STORED)


# -- opens -----------------------------------------------------------------------------------------------------------


async def test_an_open_begins_with_what_is_found(stub: Any, state: Any) -> None:
    held = await stored(stub, state, "ab")
    found = await find(state, "abcd")
    opened = await stub.OpenSequences(asked("abcd", count=2, lease_ms=20_000, reuse=IF_CHEAPER))
    assert (opened.position, opened.lease_ms, len(set(opened.sequence))) == (2, 20_000, 2)
    assert opened.match == found and found.snapshot_id == held
    for span in (0, 1):
        answer = await stub.Step(make_step(opened, 1, span=span, position=[2, 2]))
        assert list(answer.position) == [3, 3]


async def test_an_open_that_finds_nothing_begins_at_zero(stub: Any, state: Any) -> None:
    opened = await stub.OpenSequences(asked("abcd"))
    assert (opened.position, opened.match) == (0, prefix.PrefixMatch(miss=prefix.PREFIX_MISS_NEVER_STORED))
    assert list((await stub.Step(make_step(opened, 1))).position) == [1]
    other = await stub.OpenSequences(asked("abxy"))
    assert (other.match.miss, other.match.shared_position) == (prefix.PREFIX_MISS_NEVER_STORED, 2)
    plain = await stub.OpenSequences(layers.OpenSequencesRequest(count=1))
    assert not plain.HasField("match")


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_retry_tells_the_same_whatever_is_stored_now(stub: Any, state: Any, is_stored: bool) -> None:
    held = await stored(stub, state, "ab") if is_stored else b""
    request = asked("abcd", open_token=bytes(range(16)))
    first = await stub.OpenSequences(request)
    assert (first.match.snapshot_id, first.position) == (held, 2 * is_stored)
    if is_stored:
        release = pb.ReleaseSnapshotsRequest(request_id=new_id(), snapshot_id=[held])
        await state.ReleaseSnapshots(release)
    await stored(stub, state, "abc")
    assert await stub.OpenSequences(request) == first
    assert (await stub.OpenSequences(asked("abcd"))).position == 3


async def test_a_token_is_of_one_prompt(stub: Any, state: Any) -> None:
    token = bytes(range(16))
    await stub.OpenSequences(asked("abcd", open_token=token))
    longer = keys("abcd")
    longer.prompt_tokens = 5
    wrong = [
        asked("abce", open_token=token),
        asked("abcd", open_token=token, prefix=longer),
        asked("abcd", open_token=token, reuse=IF_CHEAPER),
        layers.OpenSequencesRequest(count=1, open_token=token),
    ]
    for request in wrong:
        status = status_of(await refused(stub.OpenSequences(request)))
        assert reason_of(status) == "INVALID_REQUEST" and status.message.startswith("open_token: "), request
    assert await stub.OpenSequences(asked("abcd", open_token=token, reuse=ALWAYS))
    plain = layers.OpenSequencesRequest(count=1, open_token=new_id())
    await stub.OpenSequences(plain)
    status = status_of(await refused(stub.OpenSequences(asked("abcd", open_token=plain.open_token))))
    assert reason_of(status) == "INVALID_REQUEST"


async def test_an_open_is_all_or_none(stub: Any, state: Any, server: Server) -> None:
    await stored(stub, state, "ab")
    for text in ("abcd", "xyz"):
        await stub.OpenSequences(asked(text, count=3))
    for text in ("abcd", "xyz", "new"):
        error = await refused(stub.OpenSequences(asked(text, count=3, open_token=new_id())))
        assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_FREE_LINES")
        assert server.runtime.table.num_open == 6
    known = asked("abcd", open_token=new_id())
    reply = await stub.OpenSequences(known)
    server.runtime.table.is_draining = True
    assert await stub.OpenSequences(known) == reply, "it was done before"
    for text in ("abcd", "xyz"):
        error = await refused(stub.OpenSequences(asked(text)))
        assert (error.code(), reason_of(status_of(error))) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert (await find(state, "abcd")).position == 2
