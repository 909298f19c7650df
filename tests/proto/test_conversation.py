"""What a client says on a link: calls that wait for memory, and calls that are given up while memory is theirs."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from deltaline import conversation, link
from deltaline.arena import ALIGNMENT
from deltaline.conversation import Conversation, LinkCall
from deltaline.wire import Buffer

LARGE = bytes(5 << 20)  # memory has room for one each way
ROOM_BYTES = link.MAX_PACKET_BYTES  # with what stands before it, more than a packet
REGION = 7


class Server:
    """The other end: the packets that came, and what it says."""

    def __init__(self) -> None:
        self.packets: list[tuple[link.Envelope, bytes]] = []
        self.conversation = Conversation(len(LARGE), lambda status: status)

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

    def give_memory(self, less: int = 0) -> None:
        """Answer the request for memory, the last packet."""
        ((asked, body),) = self.take(link.MEMORY)
        size = link.Place.read(body).size - less
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.truncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.say(link.MEMORY, asked.call, link.Place(REGION, 0, size).packed(), fds=[fd])

    def get_memory(self) -> None:
        """Let a large message go and be taken, so that there is memory, all of it free."""
        self.begin(LARGE)
        self.give_memory()
        ((call, place),) = self.take(link.CALL)
        self.say(link.TAKEN, call.call, place, flags=link.PLACED)


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


def test_an_array_goes_from_where_it_was_written(server: Server) -> None:
    server.get_memory()
    first, room = server.conversation.room(ROOM_BYTES), server.conversation.room(ROOM_BYTES)
    assert first is not None and room is not None
    call = server.conversation.begin("/x", lambda body: None, lambda end: None)
    server.conversation.send(call, room)
    server.flush()
    ((packet, body),) = server.take(link.CALL)
    place = link.Place.read(body)
    assert packet.flags & link.PLACED and (place.region, place.size) == (REGION, len(room))
    assert place.offset % ALIGNMENT == 0 and place.offset >= len(first)


@pytest.mark.parametrize("what", ["of its own", "of another connection", "of other elements", "of two dimensions"])
@pytest.mark.parametrize("has_memory", [True, False])
def test_an_array_that_is_no_room_is_refused(server: Server, what: str, has_memory: bool) -> None:
    """Else other bytes would go."""
    other = Server()
    for one in (server, other) if has_memory else (other,):
        one.get_memory()
    room = (server if has_memory else other).conversation.room(ROOM_BYTES)
    foreign = other.conversation.room(ROOM_BYTES)
    assert room is not None and foreign is not None
    message = {
        "of its own": np.zeros(ROOM_BYTES, np.uint8),
        "of another connection": foreign,
        "of other elements": room.view(np.float32),
        "of two dimensions": room.reshape(2, ROOM_BYTES // 2),
    }[what]
    call, _, ends = server.begin(b"begins")
    server.take(link.CALL)
    with pytest.raises(ValueError, match=r"message: expected uint8 \[n\] of this connection's room, got"):
        server.conversation.send(call, message)
    server.flush()
    server.take()
    assert not ends


def test_memory_for_a_reply_stays_until_the_server_is_done_with_a_call_given_up(server: Server) -> None:
    server.get_memory()
    call, other = (server.begin(b"asks")[0] for _ in range(2))
    server.take(link.CALL, link.CALL)
    server.say(link.ROOM, call.number, link.Place(0, 0, len(LARGE)).packed())
    ((_, place),) = server.take(link.ROOM)
    server.conversation.cancel(call)
    server.say(link.ROOM, other.number, link.Place(0, 0, len(LARGE)).packed())
    server.take(link.CANCEL)  # the other's must not lie where the server may still write
    server.say(link.STATUS, call.number, status_pb2.Status(code=code_pb2.CANCELLED).SerializeToString())
    server.take()
    server.say(link.TAKEN, call.number, place, flags=link.PLACED)
    server.take(link.ROOM)


def test_the_end_of_the_connection_ends_calls_that_have_not_gone(server: Server) -> None:
    _, _, ends = server.begin(LARGE)
    server.conversation.end(code_pb2.UNAVAILABLE, "gone")
    assert ends == [status_pb2.Status(code=code_pb2.UNAVAILABLE, message="gone")]


def test_a_status_that_can_not_be_read_ends_the_connection_and_its_call(server: Server) -> None:
    _, bodies, ends = server.begin(b"small")
    ((call, _),) = server.take(link.CALL)
    server.say(link.STATUS, call.call, b"\xff")
    assert server.conversation.error is not None and not bodies
    assert ends == [server.conversation.error]


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_message_beyond_the_most_is_refused_at_once(server: Server, has_memory: bool, has_begun: bool) -> None:
    if has_memory:
        server.get_memory()
    if has_begun:
        call, _, ends = server.begin(b"begins")
        server.take(link.CALL)
        server.conversation.send(call, bytes(len(LARGE) + 1))
        server.flush()
        server.take(link.CANCEL)
    else:
        _, _, ends = server.begin(bytes(len(LARGE) + 1))
        server.take()
    (end,) = ends
    info = error_details_pb2.ErrorInfo()
    assert end is not None and end.code == code_pb2.RESOURCE_EXHAUSTED and end.details[0].Unpack(info)
    assert end.message == "expected a message of at most 5242880 bytes, got 5242881"
    assert (info.reason, info.domain) == ("MESSAGE_TOO_LARGE", "deltaline")
    server.begin(b"goes on")
    server.take(link.CALL)
    assert server.conversation.error is None


@pytest.mark.parametrize(
    "head",
    [{"client": bytes(1 << 16)}, {"metadata": (("x", "y" * (1 << 16)),)}, {"path": "/" + "x" * (1 << 16)}],
    ids=lambda head: next(iter(head)),
)
def test_a_call_that_no_envelope_has_room_for_ends_and_no_other(server: Server, head: dict[str, Any]) -> None:
    ends = list[status_pb2.Status | None]()
    call = server.conversation.begin(**{"path": "/x", "on_message": print, "on_end": ends.append, **head})
    server.conversation.send(call, b"", is_last=True)
    server.begin(b"another's")
    assert [body for _, body in server.take(link.CALL)] == [b"another's"]
    assert [status and status.code for status in ends] == [code_pb2.RESOURCE_EXHAUSTED]
    assert not server.conversation.unsent


def test_a_call_s_head_leaves_room_for_its_message(server: Server) -> None:
    server.get_memory()
    room = (1 << 16) - 1 - len("/x")
    call = server.conversation.begin("/x", print, print, client=bytes(room))
    server.conversation.send(call, LARGE, is_last=True)
    server.flush()
    ((envelope, body),) = server.take(link.CALL)
    assert len(envelope.client) == room and link.Place.read(body).size == len(LARGE)


@pytest.mark.parametrize("size", [len(LARGE) + 1, 2**64 - 1])
def test_a_reply_that_memory_has_no_room_for_ends_its_call_at_once(server: Server, size: int) -> None:
    call, _, ends = server.begin(b"asks")
    server.take(link.CALL)
    server.say(link.ROOM, call.number, link.Place(0, 0, size).packed())
    server.take(link.CANCEL)
    assert [end and end.message for end in ends] == [f"the reply has {size} bytes, more than this link carries"]


def test_memory_that_is_less_than_was_asked_for_ends_the_connection(server: Server) -> None:
    _, _, ends = server.begin(LARGE)
    server.give_memory(less=4096)
    assert [end and end.message for end in ends] == [
        f"the server's packet can't be read: expected memory of {3 * len(LARGE)} bytes, got {3 * len(LARGE) - 4096}"
    ]


def test_a_connection_without_memory_says_so(server: Server) -> None:
    _, _, ends = server.begin(LARGE)
    refusal = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="none is left")
    for parts in (3, 2):  # two messages to the server and a reply, then one each
        ((asked, body),) = server.take(link.MEMORY)
        assert link.Place.read(body).size == parts * len(LARGE) and not server.conversation.lacks_memory
        server.say(link.STATUS, asked.call, refusal.SerializeToString())
    assert server.conversation.lacks_memory
    assert [end and end.code for end in ends] == [code_pb2.UNAVAILABLE]


def test_who_wants_more_memory_than_there_is_takes_what_it_needs() -> None:
    server, refusal = Server(), status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="none is left")
    server.conversation = Conversation(len(LARGE), lambda status: status, 8 * len(LARGE))
    _, _, ends = server.begin(LARGE)
    ((asked, body),) = server.take(link.MEMORY)
    assert link.Place.read(body).size == 9 * len(LARGE)  # for one reply beside them
    server.say(link.STATUS, asked.call, refusal.SerializeToString())
    server.give_memory(less=0)
    server.take(link.CALL)
    assert not ends and not server.conversation.lacks_memory


def test_a_connection_that_is_over_holds_no_memory(server: Server) -> None:
    server.get_memory()
    room = server.conversation.room(ROOM_BYTES)
    assert room is not None
    del room
    assert mappings() > 0
    server.conversation.fail(status_pb2.Status(code=code_pb2.UNAVAILABLE))
    assert server.conversation.room(ROOM_BYTES) is None
    assert mappings() == 0


def mappings() -> int:
    """How often this process has mapped memory of a server's."""
    return Path("/proc/self/maps").read_text().count("memfd:test")


@pytest.mark.parametrize("what", ["no descriptor", "no map"])
def test_memory_that_this_process_has_no_room_for_is_none(
    server: Server, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    _, _, ends = server.begin(LARGE)

    def map_sealed(fd: int, size: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(conversation, "map_sealed", map_sealed)
    for _ in range(2):  # as much as is wanted, then as much as is needed
        if what == "no descriptor":
            ((asked, body),) = server.take(link.MEMORY)
            server.say(link.MEMORY, asked.call, body)  # the file was dropped on its way
        else:
            server.give_memory()
    assert server.conversation.lacks_memory
    (end,) = ends
    assert end is not None and end.code == code_pb2.UNAVAILABLE
    assert end.message == "no link memory is to be had: this process can't map it: Too many open files"
