"""What a client says on a link: calls that wait for memory, and calls that are given up while memory is theirs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

import pytest
from google.rpc import code_pb2, status_pb2

from deltaline import link
from deltaline.conversation import Conversation, LinkCall
from deltaline.wire import Buffer

LARGE = bytes(200_000)
REGION, REGION_BYTES = 7, 3 * 4096 * 25  # one large message, and less than another


class Server:
    """The other end: the packets that came, and what it says."""

    def __init__(self) -> None:
        self.packets: list[tuple[link.Envelope, bytes]] = []
        self.conversation = Conversation(len(LARGE) // 2, lambda status: status)

    def begin(self, message: bytes) -> tuple[LinkCall[status_pb2.Status], list[bytes], list[status_pb2.Status | None]]:
        """A call with one message, what comes for it, and how it ends."""
        bodies, ends = list[bytes](), list[status_pb2.Status | None]()
        call = self.conversation.begin("/x", bodies.append, ends.append, client=b"me")
        self.conversation.send(call, message, is_last=True)
        self.flush()
        return call, bodies, ends

    def flush(self) -> None:
        def write(pieces: Sequence[Buffer]) -> bool:
            packet = memoryview(b"".join(pieces))
            envelope = link.read(packet)
            self.packets.append((envelope, bytes(packet[envelope.body_at :])))
            return True

        self.conversation.flush(write)

    def say(self, kind: int, call: int, body: bytes = b"", flags: int = 0, fds: Sequence[int] = ()) -> None:
        self.conversation.received(memoryview(link.pack(kind, call, flags=flags) + body), fds)
        self.flush()

    def take(self, *kinds: int) -> list[tuple[link.Envelope, bytes]]:
        """The packets since the last time, which have these kinds."""
        taken, self.packets = self.packets, []
        assert [envelope.kind for envelope, _ in taken] == list(kinds)
        return taken

    def give_memory(self) -> None:
        """Answer the request for memory, the last packet."""
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.truncate(fd, REGION_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        ((asked, _),) = self.take(link.MEMORY)
        self.say(link.MEMORY, asked.call, link.Place(REGION, 0, REGION_BYTES).packed(), fds=[fd])

    def get_memory(self) -> None:
        """Let a large message go by, so that there is memory, and all of it is free."""
        self.begin(LARGE)
        self.give_memory()
        ((begun, place),) = self.take(link.CALL)
        self.say(link.TAKEN, begun.call, place, flags=link.PLACED)


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_call_that_waits_for_memory_is_overtaken_and_numbers_rise(server: Server) -> None:
    server.begin(LARGE)
    asked = server.packets.pop()
    server.begin(b"small")
    ((small, body),) = server.take(link.CALL)
    assert (body, small.client) == (b"small", b"me")
    server.packets = [asked]
    server.give_memory()
    ((large, _),) = server.take(link.CALL)
    assert large.flags & link.PLACED and large.call > small.call


def test_memory_of_a_call_that_was_given_up_before_it_went_is_free(server: Server) -> None:
    server.get_memory()
    unsent = server.conversation.begin("/x", lambda body: None, lambda end: None)
    server.conversation.send(unsent, LARGE)
    server.conversation.flush(lambda pieces: False)  # it lies in memory, and the socket is full
    server.conversation.cancel(unsent)
    server.begin(LARGE)
    server.take(link.CALL)


def test_memory_for_a_reply_stays_until_the_server_is_done_with_a_call_given_up(server: Server) -> None:
    server.get_memory()
    call, _, _ = server.begin(b"asks")
    server.take(link.CALL)
    server.say(link.ROOM, call.number, link.Place(0, 0, len(LARGE)).packed())
    ((_, place),) = server.take(link.ROOM)
    server.conversation.cancel(call)
    server.begin(LARGE)  # it must not lie where the server may still write
    server.take(link.CANCEL)
    server.say(link.STATUS, call.number, status_pb2.Status(code=code_pb2.CANCELLED).SerializeToString())
    server.take()
    server.say(link.TAKEN, call.number, place, flags=link.PLACED)
    server.take(link.CALL)


def test_the_end_of_the_connection_ends_calls_that_have_not_gone(server: Server) -> None:
    _, _, ends = server.begin(LARGE)
    server.conversation.end(code_pb2.UNAVAILABLE, "gone")
    assert ends == [status_pb2.Status(code=code_pb2.UNAVAILABLE, message="gone")]
