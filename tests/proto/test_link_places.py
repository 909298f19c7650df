"""Link memory of the client: a place is handed out again only when the server can no longer read or write it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from itertools import pairwise

import pytest
from google.rpc import status_pb2

from deltaline import link
from deltaline.conversation import Conversation, LinkCall
from deltaline.wire import Buffer

MESSAGE_BYTES = 5 << 20
REPLY_BYTES = MESSAGE_BYTES  # all that replies have of the client's memory
REGION = 7


class Peer:
    """The server's end, by hand: what the client sent, and packets for it."""

    def __init__(self, message_bytes: int = MESSAGE_BYTES) -> None:
        self.conversation: Conversation[status_pb2.Status] = Conversation(message_bytes, lambda status: status)
        self.sent: list[tuple[link.Envelope, bytes]] = []
        self.is_full = False

    def begin(self, body: bytes | None) -> LinkCall[status_pb2.Status]:
        """A call with one message; None for a small one."""
        call = self.conversation.begin("/m", lambda body: None, lambda error: None)
        self.conversation.send(call, body or b"small", is_last=True)
        self.flush()
        return call

    def flush(self) -> None:
        self.conversation.flush(self._write)

    def receive(self, kind: int, number: int, body: bytes, *, flags: int = 0, fds: Sequence[int] = ()) -> None:
        self.conversation.received(memoryview(link.pack(kind, number, flags=flags) + body), fds)
        self.flush()

    def give_memory(self) -> None:
        """Answer the request for memory."""
        envelope, body = self.sent.pop()
        assert envelope.kind == link.MEMORY
        size = link.Place.read(body).size
        fd = os.memfd_create("deltaline", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.receive(link.MEMORY, envelope.call, link.Place(REGION, 0, size).packed(), fds=[fd])

    def places(self, kind: int) -> list[link.Place]:
        """Those of the packets of a kind that the client sent."""
        placed = [body for envelope, body in self.sent if envelope.kind == kind]
        return [link.Place.read(body) for body in placed if len(body) == len(link.Place(0, 0, 0).packed())]

    def _write(self, pieces: Sequence[Buffer]) -> bool:
        if self.is_full:
            return False
        packet = b"".join(pieces)
        envelope = link.read(memoryview(packet))
        self.sent.append((envelope, packet[envelope.body_at :]))
        return True


@pytest.fixture
def peer() -> Peer:
    return Peer()


def asks_room(peer: Peer, call: LinkCall[status_pb2.Status], num_bytes: int = REPLY_BYTES) -> None:
    peer.receive(link.ROOM, call.number, link.Place(0, 0, num_bytes).packed())


@pytest.mark.parametrize("is_answered", [True, False])
def test_the_room_of_a_cancelled_call_is_held_until_it_comes_back(peer: Peer, is_answered: bool) -> None:
    first, blocker = peer.begin(None), peer.begin(None)
    asks_room(peer, first)
    peer.give_memory()
    (room,) = peer.places(link.ROOM)
    peer.conversation.cancel(first)
    peer.flush()
    asks_room(peer, blocker)
    assert peer.places(link.ROOM) == [room]  # the server may write its reply now: into nobody else's place
    peer.receive(link.MESSAGE if is_answered else link.TAKEN, first.number, room.packed(), flags=link.PLACED)
    assert peer.places(link.ROOM) == [room, room]


def test_a_message_that_was_not_sent_leaves_no_place_taken(peer: Peer) -> None:
    first = peer.begin(bytes(MESSAGE_BYTES))
    peer.is_full = True
    peer_memory = peer.sent[-1]
    assert peer_memory[0].kind == link.MEMORY
    peer.give_memory()
    peer.conversation.cancel(first)
    peer.is_full = False
    peer.begin(bytes(MESSAGE_BYTES))
    assert [place.size for place in peer.places(link.CALL)] == [MESSAGE_BYTES]


@pytest.mark.parametrize("size", [MESSAGE_BYTES, MESSAGE_BYTES + 1])
def test_messages_that_wait_to_be_taken_leave_replies_their_room(size: int) -> None:
    """Else a server that takes none before a reply is gone, and a client whose messages fill its memory, would wait for
    each other."""
    peer = Peer(size)
    stream = peer.conversation.begin("/m", lambda body: None, lambda error: None)
    for _ in range(4):
        peer.conversation.send(stream, bytes(size))
    peer.flush()
    peer.give_memory()
    (first,), (second,) = peer.places(link.CALL), peer.places(link.MESSAGE)
    asks_room(peer, stream, size)
    (room,) = peer.places(link.ROOM)
    assert first.size == second.size == room.size == size
    ends = sorted((place.offset, place.offset + size) for place in (first, second, room))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    peer.receive(link.TAKEN, stream.number, first.packed(), flags=link.PLACED)
    assert [place.offset for place in peer.places(link.MESSAGE)] == [second.offset, first.offset]
