"""The link to another server: one connection for all calls, and a new one where it broke."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from deltaline import link
from deltaline_server.moving import ways
from deltaline_server.moving.ways import CallError, LinkWay

PATH = "/deltaline.v1.AdminService/GetServerInfo"


async def test_calls_that_find_the_link_broken_make_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[socket.socket] = []

    def connect(path: str) -> tuple[socket.socket, link.Welcome]:
        time.sleep(0.05)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        servers.append(theirs)
        return ours, link.Welcome(link.VERSION, 1, 1 << 20)

    monkeypatch.setattr(ways, "connect", connect)
    async with LinkWay("/a.sock", ()) as way:
        servers.pop().close()
        with pytest.raises(CallError):
            await way.call(PATH, b"", 5.0)
        calls = (way.call(PATH, b"", 0.3) for _ in range(3))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [TimeoutError] * 3
        assert len(servers) == 1
        servers[0].close()
