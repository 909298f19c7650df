"""Ways to another server: one connection of the link for all calls, and a new one where it broke; uploads that end."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing

import grpc
import pytest
from google.rpc import error_details_pb2

from deltaline import link
from deltaline_server.memory.mappings import Mappings
from deltaline_server.moving import ways
from deltaline_server.moving.ways import CallError, GrpcWay, LinkWay, Message

PATH = "/deltaline.v1.AdminService/GetServerInfo"
MESSAGE_BYTES = 1 << 20


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The other ends of the connections that are made, which say nothing; messages have 1 MiB at most."""
    made: list[socket.socket] = []

    def connect(path: str) -> tuple[socket.socket, link.Welcome]:
        time.sleep(0.05)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        made.append(theirs)
        return ours, link.Welcome(link.VERSION, 1, MESSAGE_BYTES)

    monkeypatch.setattr(ways, "connect", connect)
    yield made
    for one in made:
        one.close()


async def test_calls_that_find_the_link_broken_make_one_connection(servers: list[socket.socket]) -> None:
    with closing(LinkWay("/a.sock")) as way:
        await way.connect()
        servers.pop().close()
        with pytest.raises(CallError):
            await way.call(PATH, b"", 5.0)
        calls = (way.call(PATH, b"", 0.3) for _ in range(3))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [TimeoutError] * 3
        assert len(servers) == 1


async def test_a_message_that_no_memory_can_hold_is_refused_at_once(servers: list[socket.socket]) -> None:
    async def messages() -> AsyncIterator[Sequence[Message]]:
        yield [(bytes(MESSAGE_BYTES), b"x")]

    expected = f"at most {MESSAGE_BYTES} bytes, got {MESSAGE_BYTES + 1}"
    with closing(LinkWay("/a.sock")) as way, pytest.raises(CallError, match=expected) as caught:
        await way.upload(PATH, messages(), 1.0)
    info = error_details_pb2.ErrorInfo()
    assert caught.value.status.details[0].Unpack(info) and info.reason == "MESSAGE_TOO_LARGE"


async def test_as_many_messages_as_memory_holds_are_under_way(servers: list[socket.socket]) -> None:
    """In their order, and each written before those behind its group are asked for, whose pieces may be the same."""
    at_once = ways.LINK_MEMORY_BYTES // MESSAGE_BYTES
    bodies = [random.Random(number).randbytes(MESSAGE_BYTES - 1) for number in range(at_once + 4)]
    buffer, came = bytearray(MESSAGE_BYTES - 1), list[bytes]()

    async def messages() -> AsyncIterator[Sequence[Message]]:
        yield [(b"a", body) for body in bodies[:-1]]
        assert came[0][:1] == b"a"
        buffer[:] = bodies[-1]
        yield [(b"a", memoryview(buffer))]
        buffer[:] = bytes(len(buffer))

    async def serve(theirs: socket.socket) -> None:
        """Take messages, and let go of their places once no more can be under way."""
        theirs.setblocking(False)
        loop, places, is_last = asyncio.get_running_loop(), list[link.Place](), False
        while not is_last:
            packet = memoryview(await loop.sock_recv(theirs, link.MAX_PACKET_BYTES))
            envelope = link.read(packet)
            place = None if envelope.flags & link.EMPTY else link.Place.read(packet[envelope.body_at :])
            if place is None:
                is_last = True
                theirs.send(link.pack(link.MESSAGE, envelope.call, flags=link.LAST) + b"done")
            elif envelope.kind == link.MEMORY:
                mapping = Mappings(None).make(place.size)
                head = link.pack(link.MEMORY, envelope.call) + link.Place(1, 0, place.size).packed()
                socket.send_fds(theirs, [head], [mapping.fd])
            else:
                came.append(mapping.mapped[place.offset :][: place.size].tobytes())
                places.append(place)
            while len(came) >= at_once and places:
                head = link.pack(link.TAKEN, envelope.call, amount=1, flags=link.PLACED)
                theirs.send(head + places.pop(0).packed())

    with closing(LinkWay("/a.sock")) as way:
        await way.connect()
        serving = asyncio.create_task(serve(servers[0]))
        assert await way.upload(PATH, messages(), 10.0) == b"done"
        await serving
    assert came == [b"a" + body for body in bodies]


async def test_an_upload_whose_messages_fail_before_its_call_has_begun_ends() -> None:
    """Nobody answers: what is written waits for the call to begin, also once it is cancelled."""

    async def messages() -> AsyncIterator[Sequence[Message]]:
        yield [(b"first",)]
        await asyncio.sleep(0.1)
        raise RuntimeError("no more")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}") as channel:
            with pytest.raises(RuntimeError, match="no more"):
                async with asyncio.timeout(10):
                    await GrpcWay(channel, ()).upload(PATH, messages(), 30.0)
