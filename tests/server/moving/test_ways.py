"""The link to another server: one connection for all calls, and a new one where it broke."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from google.rpc import error_details_pb2

from deltaline import link
from deltaline_server.moving import ways
from deltaline_server.moving.ways import CallError, LinkWay, Message

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
    async with LinkWay("/a.sock", ()) as way:
        servers.pop().close()
        with pytest.raises(CallError):
            await way.call(PATH, b"", 5.0)
        calls = (way.call(PATH, b"", 0.3) for _ in range(3))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [TimeoutError] * 3
        assert len(servers) == 1


async def test_a_message_that_no_memory_can_hold_is_refused_at_once(servers: list[socket.socket]) -> None:
    async def messages() -> AsyncIterator[Message]:
        yield bytes(MESSAGE_BYTES), b"x"

    async with LinkWay("/a.sock", ()) as way:
        with pytest.raises(CallError, match=f"at most {MESSAGE_BYTES} bytes, got {MESSAGE_BYTES + 1}") as caught:
            await way.upload(PATH, messages(), 1.0)
    info = error_details_pb2.ErrorInfo()
    assert caught.value.status.details[0].Unpack(info) and info.reason == "MESSAGE_TOO_LARGE"
