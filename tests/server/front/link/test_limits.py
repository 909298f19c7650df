"""What the link bounds: time, memory, calls, and what a client that does not read makes the server hold."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2
from rigs.layer_calls import HeldEngine
from rigs.raw_link import RawLink, raw_link
from rigs.until import until

from deltaline import link, wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_server.app import Server
from deltaline_server.front.layer_service import NAME as LAYERS
from deltaline_server.front.link.connection import Connection, Served
from deltaline_server.front.link.held import Held
from deltaline_server.front.trust.peer import Peer

INFO = "/deltaline.v1.AdminService/GetServerInfo"
LOAD = "/deltaline.v1.AdminService/GetLoad"
LAYER = f"/{LAYERS}/"
STREAM = LAYER + "StepStream"
HIDDEN = 32


def handled(server: Server, method: str, code: str) -> float:
    """Calls of LayerService that ended with a code."""
    kind = "bidi_stream" if method == "StepStream" else "unary"
    labels = {"grpc_type": kind, "grpc_service": LAYERS, "grpc_method": method, "grpc_code": code}
    return server.metrics.registry.get_sample_value("grpc_server_handled_total", labels) or 0.0


async def test_a_call_ends_at_its_deadline(raw: RawLink, server: Server) -> None:
    number = await raw.begin(STREAM, flags=link.EMPTY, timeout_s=0.05)
    packet = await raw.receive()
    assert packet is not None and (packet.envelope.call, packet.status.code) == (number, code_pb2.DEADLINE_EXCEEDED)
    await until(lambda: handled(server, "StepStream", "Canceled") == 1)
    assert await raw.call(INFO)


async def test_a_step_has_until_its_deadline_and_no_longer(
    raw: RawLink, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = pb.OpenSequencesResponse.FromString(
        await raw.call(LAYER + "OpenSequences", pb.OpenSequencesRequest(count=1).SerializeToString(), timeout_s=60.0)
    )
    body, held = large_step(opened, 1).SerializeToString(), HeldEngine(server, monkeypatch)
    await raw.begin(LAYER + "Step", body, timeout_s=0.05)
    packet = await raw.receive()
    assert packet is not None and packet.status.code == code_pb2.DEADLINE_EXCEEDED
    held.release()
    # Applied or not, the same step is answered now.
    again = pb.StepResponse.FromString(await raw.call(LAYER + "Step", body, timeout_s=60.0))
    assert again.outcome[0] != pb.ROW_OUTCOME_REFUSED


async def test_a_cancelled_call_says_when_it_is_over_and_nothing_more(raw: RawLink, server: Server) -> None:
    number = await raw.begin(STREAM, flags=link.EMPTY)
    await raw.send(link.pack(link.CANCEL, number))
    over = await raw.receive()
    assert over is not None and (over.envelope.call, over.status.code) == (number, code_pb2.CANCELLED)
    assert handled(server, "StepStream", "Canceled") == 1
    for kind, flags in ((link.CANCEL, 0), (link.MESSAGE, 0), (link.MESSAGE, link.LAST)):
        await raw.send(link.pack(kind, number, flags=flags))
    assert await raw.call(INFO)  # and nothing came before its answer


async def test_calls_beyond_the_most_are_refused_and_may_come_again(raw: RawLink) -> None:
    numbers = [await raw.begin(STREAM, flags=link.EMPTY) for _ in range(link.MAX_CALLS)]
    await raw.begin(INFO)
    packet = await raw.receive()
    assert packet is not None and packet.status.code == code_pb2.RESOURCE_EXHAUSTED
    assert "64 calls of this connection are in flight" in packet.status.message
    await raw.send(link.pack(link.MESSAGE, numbers[0], flags=link.LAST | link.EMPTY))
    over = await raw.receive()
    assert over is not None and (over.envelope.call, over.status.code) == (numbers[0], 0)
    assert await raw.call(INFO)


def large_step(opened: pb.OpenSequencesResponse, tokens: int) -> pb.StepRequest:
    return pb.StepRequest(
        server_epoch=opened.server_epoch,
        sequence=[opened.sequence[0]],
        kind=[pb.ROW_KIND_PREFILL],
        step=[1],
        position=[0],
        accepted=[-1],
        query_start_loc=[0, tokens],
        hidden=wire.encode(np.ones((tokens, HIDDEN), dtype=np.float32)),
    )


async def test_large_messages_lie_in_link_memory(raw: RawLink, server: Server) -> None:
    opened = pb.OpenSequencesResponse.FromString(
        await raw.call(LAYER + "OpenSequences", pb.OpenSequencesRequest(count=1).SerializeToString())
    )
    place, fd = await raw.memory(1 << 20)
    assert server.runtime.link_regions.used_bytes == 1 << 20
    body = large_step(opened, 2000).SerializeToString()
    assert len(body) > link.MAX_PACKET_BYTES
    os.pwrite(fd, body, 4096)
    mine = place._replace(offset=4096, size=len(body))
    number = await raw.begin(LAYER + "Step", mine.packed(), flags=link.LAST | link.PLACED)
    taken = await raw.receive()
    assert taken is not None and (taken.kind, taken.place) == (link.TAKEN, mine)
    os.pwrite(fd, b"\xff" * len(body), 4096)  # the client's again
    asked = await raw.receive()
    assert asked is not None and (asked.kind, asked.envelope.call) == (link.ROOM, number)
    room = asked.place._replace(region=place.region, offset=1 << 19)
    assert room.size > link.MAX_PACKET_BYTES
    await raw.send(link.pack(link.ROOM, number) + room.packed())
    packet = await raw.receive()
    assert packet is not None and packet.kind == link.MESSAGE
    assert packet.envelope.flags == link.LAST | link.PLACED and packet.place == room
    response = pb.StepResponse.FromString(os.pread(fd, room.size, room.offset))
    assert list(response.position) == [2000] and len(response.hidden.inline) == 2000 * HIDDEN * 4
    os.close(fd)


@pytest.mark.parametrize("how", ["refused", "unread", "late", "too large", "late room", "wrong room"])
async def test_a_place_comes_back_once_whatever_became_of_its_call(raw: RawLink, how: str) -> None:
    opened = pb.OpenSequencesResponse.FromString(
        await raw.call(LAYER + "OpenSequences", pb.OpenSequencesRequest(count=1).SerializeToString())
    )
    region, fd = await raw.memory(1 << 20)
    mine, placed = region._replace(offset=4096, size=64), link.LAST | link.PLACED
    if how == "refused":
        await raw.begin("/no.Service/Method", mine.packed(), flags=placed)
    elif how == "unread":  # one message is expected
        number = await raw.begin(LAYER + "CloseSequences", flags=link.EMPTY)
        await raw.send(link.pack(link.MESSAGE, number))
        await raw.send(link.pack(link.MESSAGE, number, flags=placed) + mine.packed())
    elif how == "late":
        number = await raw.begin(STREAM, flags=link.EMPTY)
        await raw.send(link.pack(link.CANCEL, number))
        await raw.send(link.pack(link.MESSAGE, number, flags=placed) + mine.packed())
    elif how == "too large":
        mine = mine._replace(size=1 << 40)
        await raw.begin(INFO, mine.packed(), flags=placed)
    else:
        body = large_step(opened, 2000).SerializeToString()
        os.pwrite(fd, body, 0)
        number = await raw.begin(LAYER + "Step", region._replace(size=len(body)).packed(), flags=placed)
        for kind in (link.TAKEN, link.ROOM):
            packet = await raw.receive()
            assert packet is not None and packet.kind == kind
        if how == "late room":
            await raw.send(link.pack(link.CANCEL, number))
        else:
            mine = mine._replace(offset=1 << 20)
        await raw.send(link.pack(link.ROOM, number) + mine.packed())
    os.close(fd)
    watched = await raw.begin(LOAD)
    came: list[link.Place] = []
    while (packet := await raw.receive()) is not None and packet.envelope.call != watched:
        came += [packet.place] if packet.kind == link.TAKEN else []
    if not came:  # its call ends behind
        packet = await raw.receive()
        came += [packet.place] if packet is not None else []
    assert came == [mine]


async def test_a_request_beyond_the_limit_is_refused_before_it_is_copied(raw: RawLink, server: Server) -> None:
    limit = server.config.inline_limit_bytes + (1 << 20)
    await raw.begin(INFO, link.Place(1, 0, limit + 1).packed(), flags=link.LAST | link.PLACED)
    assert (await raw.given_back()).size == limit + 1
    packet = await raw.receive()
    assert packet is not None and packet.status.code == code_pb2.RESOURCE_EXHAUSTED
    assert packet.status.message == f"expected a message of at most {limit} bytes, got {limit + 1}"


async def test_memory_has_a_bound_of_its_own(make_server: Callable[..., Server], link_option: str) -> None:
    small = make_server(link=link_option, link_memory_bytes=1 << 20)
    async with small as server, raw_link(server.link.path) as one, raw_link(server.link.path) as other:
        _, fd = await one.memory(1 << 19)
        os.close(fd)
        await other.send(link.pack(link.MEMORY, 1) + link.Place(0, 0, 1 << 20).packed())
        packet = await other.receive()
        assert packet is not None and "do not fit" in packet.status.message
        one.close()
        await until(lambda: server.runtime.link_regions.used_bytes == 0)
        _, fd = await other.memory(1 << 20)
        os.close(fd)


async def test_memory_can_be_off(make_server: Callable[..., Server], link_option: str) -> None:
    async with make_server(link=link_option, link_memory_bytes=0) as server, raw_link(server.link.path) as raw:
        await raw.send(link.pack(link.MEMORY, 1) + link.Place(0, 0, 1).packed())
        packet = await raw.receive()
        assert packet is not None and packet.status.code == code_pb2.FAILED_PRECONDITION


async def test_a_server_that_stops_ends_its_links_with_a_reason(
    make_server: Callable[..., Server], link_option: str
) -> None:
    async with make_server(link=link_option) as server, raw_link(server.link.path) as raw:
        await raw.begin(STREAM, flags=link.EMPTY)
        assert await raw.call(INFO)
        await server.stop()
        assert await raw.goodbye() == "the server stops"
        assert not os.listdir(os.path.dirname(link_option))


async def test_a_server_stops_though_its_clients_hear_nothing(
    make_server: Callable[..., Server], link_option: str, caplog: pytest.LogCaptureFixture
) -> None:
    started = make_server(link=link_option)
    async with started as server, raw_link(server.link.path) as wrong, raw_link(server.link.path) as waiting:
        for raw in (wrong, waiting):
            raw.socket.shutdown(socket.SHUT_RD)
        await wrong.send(b"x")
        await until(lambda: server.link.num_connections == 1)
        await server.stop()
        assert server.link.num_connections == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Rig:
    """A connection over a socket pair, whose calls a handler of the test answers."""

    def __init__(self, answer: Callable[[bytes], bytes], held: Held | None = None) -> None:
        self.started = 0

        async def unary(body: bytes, context: Any) -> bytes:
            self.started += 1
            return answer(body)

        handler: Any = grpc.unary_unary_rpc_method_handler(unary)
        nothing: Any = SimpleNamespace(release=None, refused=lambda reason, count: None)
        self.held = held or Held(1 << 30)
        buffer = memoryview(bytearray(link.MAX_PACKET_BYTES))
        served = Served(lambda method: handler, nothing, self.held, nothing, 1, 1 << 20, buffer)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.socket, theirs):
            end.setblocking(False)
        self.ends: list[Connection] = []
        self.connection = Connection(served, theirs, Peer("peer"), self.ends.append)
        self.connection.start()
        assert self.socket.recv(100)[0] == link.WELCOME
        self.sent = 0

    def send(self) -> bool:
        """Begin a call, unless the socket is full."""
        try:
            self.socket.send(link.pack(link.CALL, self.sent + 1, flags=link.LAST, method=b"m"))
        except BlockingIOError:
            return False
        self.sent += 1
        return True

    async def turns(self) -> None:
        """Let the loop go on as long as that makes the connection do something."""
        idle, before = 0, -1
        while idle < 50:
            idle, before = (idle + 1, before) if self.started == before else (0, self.started)
            await asyncio.sleep(0)


@pytest.fixture
async def make_rig() -> AsyncIterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*arguments: Any) -> Rig:
        made.append(Rig(*arguments))
        return made[-1]

    yield make
    for rig in made:
        rig.connection.end("")
        rig.socket.close()


async def test_a_client_that_does_not_read_is_not_read(make_rig: Callable[..., Rig]) -> None:
    rig, reply_bytes = make_rig(lambda body: bytes(50_000)), 50_000
    while True:
        before = rig.sent
        while rig.send():
            pass
        await rig.turns()
        if rig.sent == before:
            break
    assert 0 < rig.started < rig.sent < 5_000  # the others wait in the socket
    assert rig.held.num_bytes <= link.MAX_CALLS * (reply_bytes + 100)
    answered = 0
    while answered < rig.sent:
        try:
            answered += rig.socket.recv(link.MAX_PACKET_BYTES)[0] == link.MESSAGE
        except BlockingIOError:
            await asyncio.sleep(0)
    assert rig.started == rig.sent and rig.held.num_bytes == 0


async def test_of_too_much_that_is_held_who_holds_most_is_ended(make_rig: Callable[..., Rig]) -> None:
    held = Held(100_000)
    modest, greedy = (make_rig(lambda body: bytes(120_000), held) for _ in range(2))
    for rig, count in ((modest, 1), (greedy, 3)):  # a socket takes one such reply by itself
        for _ in range(count):
            assert rig.send()
        await rig.turns()
    assert (modest.ends, greedy.ends) == ([], [greedy.connection])
    assert held.num_bytes == 0
    assert modest.socket.recv(link.MAX_PACKET_BYTES)[0] == link.MESSAGE
