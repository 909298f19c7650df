"""Sockets of the link: the largest packet goes, or somebody says that it can't."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator

import pytest
from google.rpc import code_pb2, status_pb2

from deltaline import link
from deltaline.conversation import Conversation
from deltaline.link_socket import LinkSocket, make_room, receive, send

LARGEST = bytes(link.MAX_PACKET_BYTES)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends, of which the first has no room for the largest packet, as where net.core.wmem_default is small."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
        for end in (ours, theirs):
            end.setblocking(False)
        with pytest.raises(OSError) as refused:
            ours.sendmsg([LARGEST])
        assert refused.value.errno == errno.EMSGSIZE
        yield ours, theirs


def test_a_socket_gets_room_for_the_largest_packet(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    make_room(ours)
    assert send(ours, [LARGEST])
    assert len(theirs.recv(2 * len(LARGEST))) == len(LARGEST)


def test_room_that_the_system_does_not_give_is_an_error(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MAX_PACKET_BYTES", 1 << 29)
    with pytest.raises(OSError, match=r"may have [0-9]+ bytes to send \(net\.core\.wmem_max\), .* need 536870944$"):
        make_room(ends[0])


def test_a_packet_that_can_not_go_ends_the_connection(ends: tuple[socket.socket, socket.socket]) -> None:
    conversation: Conversation[status_pb2.Status] = Conversation(1, lambda status: status)
    ours, theirs = ends
    theirs.send(link.pack(link.GOODBYE) + b"why")
    assert send(ours, [LARGEST])
    buffer = memoryview(bytearray(link.MAX_PACKET_BYTES))
    assert receive(ours, buffer, conversation)  # what was said before is read first
    assert conversation.error is not None and conversation.error.code == code_pb2.UNAVAILABLE
    assert not receive(ours, buffer, conversation)
    assert theirs.recv(1) == b""


@pytest.mark.parametrize("is_ours", [True, False])
async def test_who_waits_for_the_end_is_told_of_it(ends: tuple[socket.socket, socket.socket], is_ours: bool) -> None:
    conversation: Conversation[status_pb2.Status] = Conversation(1, lambda status: status)
    ours, theirs = ends
    connection = LinkSocket(ours, conversation)
    assert not connection.ended.is_set()
    if is_ours:
        connection.close(status_pb2.Status(code=code_pb2.CANCELLED))
    else:
        theirs.close()
    async with asyncio.timeout(5.0):
        await connection.ended.wait()
    assert connection.is_over
