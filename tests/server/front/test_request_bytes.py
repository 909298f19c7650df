"""A request is refused before it is parsed where it has more bytes than any of its kind needs; what it asks for is
hashed once, and what goes on without its call keeps no message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from rigs.layer_calls import reason_of
from rigs.ways import Way, grpc_way, link_way

from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import prefix_pb2 as prefix
from deltaline.v1 import state_service_pb2 as pb
from deltaline.v1.state_service_pb2_grpc import StateServiceStub
from deltaline_server.app import Server
from deltaline_server.front.grpc_port import SERVICES
from deltaline_server.front.requests import MAX_SNAPSHOTS, most_bytes
from deltaline_server.tables import request_ids
from deltaline_server.tables.prefixes.keys import MAX_KEY_BYTES, MAX_KEYS
from deltaline_server.tables.request_ids import RequestIds

MAX_SEQUENCES = 8
BOUNDED = {
    method.full_name: method
    for service in SERVICES
    for method in service.methods
    if not method.client_streaming and method.name != "Step"
}
STATE = pb.DESCRIPTOR.services_by_name["StateService"].methods_by_name
KEYS = prefix.PrefixKeys(
    key=[bytes([number % 256]) * MAX_KEY_BYTES for number in range(MAX_KEYS)],
    position=range(1, MAX_KEYS + 1),
    prompt_tokens=MAX_KEYS,
)
IDS = [number.to_bytes(16, "big") for number in range(MAX_SNAPSHOTS)]


@pytest.fixture
async def ways(make_server: Callable[..., Server], tmp_path: Path) -> AsyncIterator[list[Way]]:
    """By gRPC and by the link."""
    path = str(tmp_path / "run" / "link.sock")
    async with make_server(link=path, max_sequences=MAX_SEQUENCES) as server, AsyncExitStack() as stack:
        channel = grpc.aio.insecure_channel(server.address)
        yield [await stack.enter_async_context(way) for way in (grpc_way(channel), link_way(path))]


async def test_what_no_request_needs_is_refused_before_it_is_parsed(ways: list[Way]) -> None:
    body = bytes(most_bytes(MAX_SEQUENCES) + 1)  # which can't be parsed
    assert len(BOUNDED) > 20
    for way in ways:
        for name, method in BOUNDED.items():
            said = await way.call(method, [body], (), 60.0)
            assert said.status is not None, name
            assert reason_of(said.status) == "MESSAGE_TOO_LARGE", name
            said = await way.call(method, [body[1:]], (), 60.0)
            assert said.status is not None and reason_of(said.status) == "INVALID_REQUEST", name


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (STATE["FindSnapshots"], pb.FindSnapshotsRequest(prefix=KEYS)),
        (STATE["RenewSnapshots"], pb.RenewSnapshotsRequest(request_id=bytes(16), snapshot_id=IDS)),
        (STATE["ReleaseSnapshots"], pb.ReleaseSnapshotsRequest(request_id=bytes(16), snapshot_id=IDS)),
    ],
    ids=lambda one: one.name if isinstance(one, MethodDescriptor) else "",
)
async def test_the_largest_requests_are_answered(ways: list[Way], method: MethodDescriptor, message: Message) -> None:
    for way in ways:
        said = await way.call(method, [message.SerializeToString()], (), 60.0)
        assert said.code is grpc.StatusCode.OK, said


@pytest.mark.parametrize("num_rows", [1, MAX_KEYS, 2**20])
def test_as_many_sequences_as_a_server_may_have_fit_into_a_request(num_rows: int) -> None:
    rows: dict[str, Any] = {"server_epoch": 2**64 - 1, "sequence": [2**64 - 1] * num_rows}
    largest = [
        layers.OpenSequencesRequest(count=num_rows, prefix=KEYS, open_token=bytes(16), adapter="a" * 1024),
        layers.CommitSequencesRequest(**rows, span=2**32 - 1, step=[2**64 - 1] * num_rows, accepted=[-1] * num_rows),
        pb.CreateSnapshotsRequest(**rows, request_id=bytes(16), prefix_key=[bytes(MAX_KEY_BYTES)] * num_rows),
        pb.RestoreSequencesRequest(request_id=bytes(16), snapshot_id=[bytes(16)] * num_rows),
        pb.MoveSequencesRequest(**rows, request_id=bytes(16), target="a" * 1024),
    ]
    for message in largest:
        # Each number of an array that is not packed has its tag.
        unpacked = sum(
            len(value)
            for one in (message, getattr(message, "prefix", None))
            if one is not None
            for field, value in one.ListFields()
            if field.is_repeated and field.type != field.TYPE_BYTES
        )
        assert message.ByteSize() + unpacked <= most_bytes(num_rows), message.DESCRIPTOR.name


CALLS = [
    pb.ForkSequencesRequest(request_id=bytes(16), server_epoch=1, sequence=[1], count=1),
    pb.CreateSnapshotsRequest(request_id=bytes(16), server_epoch=1, sequence=[1], pinned=True),
    pb.RestoreSequencesRequest(request_id=bytes(16), snapshot_id=IDS[:1]),
    pb.RenewSnapshotsRequest(request_id=bytes(16), snapshot_id=IDS[:1]),
    pb.ReleaseSnapshotsRequest(request_id=bytes(16), snapshot_id=IDS[:1]),
    pb.MoveSequencesRequest(request_id=bytes(16), server_epoch=1, sequence=[1], target="a:1"),
]


@pytest.mark.parametrize("message", CALLS, ids=lambda message: message.DESCRIPTOR.name)
async def test_work_keeps_no_message(channel: Any, monkeypatch: pytest.MonkeyPatch, message: Any) -> None:
    kept = list[object]()

    async def once(self: RequestIds, principal: Any, method: str, id: bytes, content: bytes, work: Any) -> bytes:
        kept.extend(cell.cell_contents for cell in work.__closure__)
        return b""

    monkeypatch.setattr(RequestIds, "once", once)
    await getattr(StateServiceStub(channel), message.DESCRIPTOR.name.removesuffix("Request"))(message)
    assert kept and not any(isinstance(one, Message) for one in kept)


async def test_a_request_is_hashed_once(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[bytes]()

    def count(content: bytes, *, digest_size: int) -> Any:
        hashed.append(content)
        return blake2b(content, digest_size=digest_size)

    monkeypatch.setattr(request_ids, "blake2b", count)
    message = pb.ReleaseSnapshotsRequest(request_id=bytes(16), snapshot_id=IDS[:1])
    for number in (1, 2):  # done, and found
        await StateServiceStub(channel).ReleaseSnapshots(message)
        assert hashed == [message.SerializeToString()] * number
