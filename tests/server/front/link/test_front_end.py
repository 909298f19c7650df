"""What a front end's connection may do that a client's may not, and that none of its clients suffers for another."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from rigs.garbage import nothing_left
from rigs.raw_link import TIMEOUT_S, Packet, RawLink
from rigs.until import until

from deltaline import link
from deltaline.arena import map_sealed
from deltaline_server.front.ends.forward import AHEAD_BYTES
from deltaline_server.front.link.call import TOLD_BYTES
from deltaline_server.front.link.connection import KEPT_PART, Connection, Served
from deltaline_server.front.link.held import Held
from deltaline_server.front.trust.peer import Peer
from deltaline_server.memory.regions import Regions

HELD_BYTES = 1_000_000


class Rig(RawLink):
    """The front end's end of a connection. The method `ask` tells whom a call is from; `hold` reads its first message,
    and the others once it may; `flood` answers with replies until it is cancelled; `echo` answers with the request,
    once it may; `linger` takes that long to be cancelled."""

    def __init__(self, held_bytes: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        ours.settimeout(TIMEOUT_S)
        theirs.setblocking(False)
        self.may_read, self.may_echo, self.num_replies = asyncio.Event(), asyncio.Event(), 0
        self.held = Held(held_bytes)
        self.ends: list[Connection] = []
        self.regions = Regions(
            limit_bytes=1 << 20, default_lease_s=math.inf, max_lease_s=math.inf, clock=time.monotonic
        )
        handlers: dict[bytes, Any] = {
            b"ask": grpc.unary_unary_rpc_method_handler(self._ask),
            b"hold": grpc.stream_unary_rpc_method_handler(self._hold),
            b"flood": grpc.unary_stream_rpc_method_handler(self._flood),
            b"echo": grpc.unary_unary_rpc_method_handler(self._echo),
            b"linger": grpc.stream_unary_rpc_method_handler(self._linger),
        }
        observer: Any = SimpleNamespace(refused=lambda reason, count: None)
        buffer = memoryview(bytearray(link.MAX_PACKET_BYTES))
        served = Served(handlers.get, self.regions, self.held, observer, 1, 1 << 19, buffer)
        self.connection = Connection(served, theirs, Peer("front end"), self.ends.append, is_front_end=True)

    async def _ask(self, body: bytes, context: Any) -> bytes:
        return bytes(context.peer(), "utf-8")

    async def _hold(self, _: Any, context: Any) -> bytes:
        await context.read()
        await self.may_read.wait()
        num_bytes = 0
        while (body := await context.read()) is not grpc.aio.EOF:
            num_bytes += len(body)
        return b"%d" % num_bytes

    async def _flood(self, body: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield bytes(100_000)
            self.num_replies += 1

    async def _echo(self, body: bytes, context: Any) -> bytes:
        await self.may_echo.wait()
        return body

    async def _linger(self, _: Any, context: Any) -> bytes:
        with suppress(asyncio.CancelledError):
            await self.may_read.wait()
        await self.may_echo.wait()
        return b""

    async def go(self, number: int, method: bytes, client: bytes, body: bytes = b"", flags: int = 0) -> None:
        """Begin a call of a client."""
        await self.send(link.pack(link.CALL, number, flags=flags, method=method, client=client) + body)

    async def packet(self, kind: int) -> Packet:
        packet = await self.receive()
        assert packet is not None and packet.kind == kind, packet
        return packet


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(getattr(request, "param", HELD_BYTES))
    made.connection.start()
    await made.packet(link.WELCOME)
    yield made
    made.connection.end("")
    made.close()
    await asyncio.gather(*made.connection.tasks, return_exceptions=True)
    await asyncio.sleep(0)
    await made.regions.close()
    assert made.held.num_bytes == 0 and not made.held.shares


async def test_a_call_that_is_over_leaves_nothing_to_the_garbage_collector(rig: Rig) -> None:
    """Its pauses, when it has much to look at, are what others wait for."""
    with nothing_left("deltaline"):
        await rig.go(1, b"ask", b"ipv4:10.0.0.1:5", flags=link.LAST)
        await rig.packet(link.MESSAGE)
        await asyncio.sleep(0.01)


async def test_calls_are_from_whom_it_says(rig: Rig) -> None:
    for number, client in ((1, b"ipv4:10.0.0.1:5"), (2, b"ipv4:10.0.0.2:5")):
        await rig.go(number, b"ask", client, flags=link.LAST)
        assert (await rig.packet(link.MESSAGE)).body == client


async def test_a_call_whose_metadata_can_not_be_read_is_refused_alone(rig: Rig) -> None:
    place, fd = await rig.memory(1 << 19)
    os.close(fd)
    await rig.go(2, b"hold", b"a")
    head = link.pack(link.CALL, 3, flags=link.PLACED, method=b"hold", metadata=b"a\0b\0c", client=b"b")
    await rig.send(head + place.packed())
    assert (await rig.packet(link.TAKEN)).place == place
    ended = await rig.packet(link.STATUS)
    assert (ended.envelope.call, ended.status.code) == (3, code_pb2.INVALID_ARGUMENT)
    assert ended.status.message == "expected a value for each name of the metadata, got 3 texts"
    rig.may_read.set()
    await rig.send(link.pack(link.MESSAGE, 2, flags=link.LAST | link.EMPTY))
    assert (await rig.packet(link.MESSAGE)).body == b"0"


async def test_more_calls_are_in_flight_than_a_client_has(rig: Rig) -> None:
    for number in range(1, link.MAX_CALLS + 2):
        await rig.go(number, b"hold", b"a")
    await rig.go(link.MAX_CALLS + 2, b"ask", b"b", flags=link.LAST)
    assert (await rig.packet(link.MESSAGE)).body == b"b"


async def test_the_call_that_makes_it_hold_most_ends_and_no_other(rig: Rig) -> None:
    body = bytes(100_000)
    for number, client, count in ((1, b"a", 3), (2, b"b", 9)):
        await rig.go(number, b"hold", client, body)
        for _ in range(count):
            await rig.send(link.pack(link.MESSAGE, number) + body)
    ended = await rig.packet(link.STATUS)
    assert (ended.envelope.call, ended.status.code) == (2, code_pb2.UNAVAILABLE)
    assert "holds too much" in ended.status.message
    await until(lambda: rig.held.num_bytes == 4 * len(body))  # what was read is in the handler's hand
    rig.may_read.set()
    await rig.send(link.pack(link.MESSAGE, 1, flags=link.LAST | link.EMPTY))
    assert (await rig.packet(link.MESSAGE)).body == b"%d" % (3 * len(body))


async def test_a_call_that_is_ended_is_not_ended_again_in_place_of_others(rig: Rig) -> None:
    body = bytes(100_000)
    for number, method, client, count in ((1, b"linger", b"a", 5), (2, b"hold", b"b", 4)):
        await rig.go(number, method, client, body)
        for _ in range(count):
            await rig.send(link.pack(link.MESSAGE, number) + body)
    ended = await rig.packet(link.STATUS)
    assert (ended.envelope.call, ended.status.code) == (1, code_pb2.UNAVAILABLE)
    assert "too much for this call" in ended.status.message
    assert rig.held.num_bytes == 5 * len(body) and len(rig.connection.tasks) == 2
    for _ in range(6):
        await rig.send(link.pack(link.MESSAGE, 2) + body)
    assert (await rig.packet(link.STATUS)).envelope.call == 2
    assert rig.held.num_bytes == 0
    rig.may_echo.set()


async def test_a_call_is_ended_once_where_its_status_has_to_wait(rig: Rig) -> None:
    body = bytes(100_000)
    await rig.go(1, b"hold", b"a", body)
    for _ in range(3):
        await rig.send(link.pack(link.MESSAGE, 1) + body)
    echoes = range(2, 8)
    for number in echoes:
        await rig.go(number, b"echo", b"b", body, link.LAST)
    await until(lambda: rig.held.num_bytes == 10 * len(body))
    rig.may_echo.set()  # nobody reads the answers: they wait in the socket, and then behind it
    came = [await rig.receive() for _ in (1, *echoes)]
    ended = [(packet.envelope.call, packet.kind) for packet in came if packet is not None]
    assert sorted(ended) == [(1, link.STATUS), *((number, link.MESSAGE) for number in echoes)]
    await rig.go(8, b"ask", b"c", flags=link.LAST)
    assert (await rig.packet(link.MESSAGE)).body == b"c"  # and nothing came before


async def test_a_call_that_is_ended_gives_the_place_that_it_kept_back_once(rig: Rig) -> None:
    place, fd = await rig.memory(1 << 19)
    os.close(fd)
    large = place._replace(size=400_000)
    await rig.go(2, b"echo", b"a", large.packed(), link.PLACED | link.LAST)
    for number in (3, 4):
        await rig.go(number, b"hold", b"b", bytes(100_000))
        for _ in range(2):
            await rig.send(link.pack(link.MESSAGE, number) + bytes(100_000))
    await rig.go(5, b"hold", b"b", bytes(1))
    more = place._replace(size=500_000)  # too much with its first message
    await rig.go(6, b"echo", b"b", more.packed(), link.PLACED | link.LAST)
    for number, kept in ((2, large), (6, more)):
        came = {packet.kind: packet for packet in [await rig.receive() for _ in range(2)] if packet is not None}
        assert came[link.STATUS].envelope.call == came[link.TAKEN].envelope.call == number
        assert came[link.TAKEN].place == kept
    await rig.go(7, b"ask", b"c", flags=link.LAST)
    assert (await rig.packet(link.MESSAGE)).body == b"c"  # and nothing came before


async def test_a_large_message_leaves_its_memory_before_it_is_read(rig: Rig) -> None:
    await rig.go(1, b"hold", b"a")
    place, fd = await rig.memory(1 << 19)
    os.close(fd)
    large = place._replace(size=200_000)
    await rig.send(link.pack(link.MESSAGE, 1, flags=link.PLACED) + large.packed())
    let_go = await rig.packet(link.TAKEN)
    assert (let_go.place, let_go.envelope.amount) == (large, 0)
    rig.may_read.set()
    await rig.send(link.pack(link.MESSAGE, 1, flags=link.LAST | link.EMPTY))
    assert (await rig.packet(link.MESSAGE)).body == b"200000"


async def test_what_was_taken_is_told_before_a_front_end_waits_for_it(rig: Rig) -> None:
    rig.may_read.set()
    await rig.go(1, b"hold", b"a")
    place, fd = await rig.memory(1 << 19)
    os.close(fd)
    count = TOLD_BYTES // place.size
    for num_told in (1 + count, count):  # the first time with the message that came with the call
        for _ in range(count):
            await rig.send(link.pack(link.MESSAGE, 1, flags=link.PLACED) + place.packed())
            assert (await rig.packet(link.TAKEN)).place == place
        assert (await rig.packet(link.TAKEN)).envelope.amount == num_told
    assert TOLD_BYTES < AHEAD_BYTES


@pytest.mark.parametrize(("size", "is_taken"), [(1 << 19, True), ((1 << 19) + 1, False)])
async def test_a_message_has_no_more_bytes_than_the_most(rig: Rig, size: int, is_taken: bool) -> None:
    place, fd = await rig.memory(1 << 20)
    os.close(fd)
    await rig.go(2, b"ask", b"a", place._replace(size=size).packed(), link.PLACED | link.LAST)
    if is_taken:
        let_go = await rig.packet(link.TAKEN)  # that it was read is not told: it is one message
        assert (let_go.place, let_go.envelope.amount) == (place._replace(size=size), 0)
        assert (await rig.packet(link.MESSAGE)).body == b"a"
    else:
        assert await rig.goodbye() == "expected at most 524288 bytes, got 524289"


async def test_a_reply_goes_where_its_request_lay(rig: Rig) -> None:
    place, fd = await rig.memory(1 << 19)
    rig.may_echo.set()
    with map_sealed(fd, place.size) as memory:
        memory[1024:201_024] = content = os.urandom(200_000)
        asked = place._replace(offset=1024, size=200_000)
        await rig.go(2, b"echo", b"a", asked.packed(), link.PLACED | link.LAST)
        reply = await rig.packet(link.MESSAGE)  # neither is the place let go, nor room for the reply asked for
        assert reply.envelope.flags == link.PLACED | link.LAST and reply.place == asked
        assert memory[1024:201_024] == content
    os.close(fd)


async def test_a_reply_that_is_too_much_to_hold_gives_the_place_of_its_request_back(rig: Rig) -> None:
    place, fd = await rig.memory(1 << 19)
    os.close(fd)
    await rig.go(2, b"hold", b"a", bytes(100_000))
    for _ in range(2):
        await rig.send(link.pack(link.MESSAGE, 2) + bytes(100_000))
    large = place._replace(size=400_000)
    await rig.go(3, b"echo", b"b", large.packed(), link.PLACED | link.LAST)
    await until(lambda: rig.held.num_bytes == 700_000)
    rig.may_echo.set()
    ended = await rig.packet(link.STATUS)
    assert (ended.envelope.call, ended.status.code) == (3, code_pb2.UNAVAILABLE)
    let_go = await rig.packet(link.TAKEN)
    assert (let_go.envelope.call, let_go.place) == (3, large)


@pytest.mark.parametrize("rig", [2**24], indirect=True)
async def test_requests_that_wait_keep_a_part_of_the_memory_and_give_it_back(rig: Rig) -> None:
    place, fd = await rig.memory(1 << 19)
    os.close(fd)
    num_kept = link.memory_bytes(1 << 19) // KEPT_PART // place.size
    for number in range(2, 2 + num_kept):
        await rig.go(number, b"echo", b"a", place.packed(), link.PLACED | link.LAST)
    await rig.go(100, b"echo", b"b", place.packed(), link.PLACED | link.LAST)
    let_go = await rig.packet(link.TAKEN)
    assert (let_go.envelope.call, let_go.place) == (100, place)
    for number in range(2, 2 + num_kept):  # a call that is over keeps nothing
        await rig.send(link.pack(link.CANCEL, number))
        assert (await rig.packet(link.STATUS)).status.code == code_pb2.CANCELLED
        let_go = await rig.packet(link.TAKEN)
        assert (let_go.envelope.call, let_go.place) == (number, place)
    rig.may_echo.set()
    room = await rig.packet(link.ROOM)
    assert room.envelope.call == 100
    await rig.send(link.pack(link.ROOM, 100) + place.packed())
    assert (await rig.packet(link.MESSAGE)).place == place
    await rig.go(101, b"echo", b"b", place.packed(), link.PLACED | link.LAST)
    assert (await rig.packet(link.MESSAGE)).place == place


async def test_a_stream_waits_for_its_reader(rig: Rig) -> None:
    await rig.go(1, b"flood", b"a", flags=link.LAST)
    most = -(-link.UNREAD_BYTES // 100_000)
    for _ in range(most):
        await rig.packet(link.MESSAGE)
    await rig.go(2, b"ask", b"b", flags=link.LAST)
    assert (await rig.packet(link.MESSAGE)).body == b"b"  # and nothing of the stream came before
    assert rig.num_replies == most - 1
    await rig.send(link.pack(link.TAKEN, 1, amount=200_000))
    for _ in range(2):
        assert (await rig.packet(link.MESSAGE)).envelope.call == 1


async def test_a_reason_that_nobody_is_there_to_hear_ends_it_once(rig: Rig) -> None:
    rig.close()
    rig.connection.end("the server stops")
    assert rig.ends == [rig.connection]
