"""What a client says and hears on one connection of the link, without the socket.

Whoever has the socket hands packets to `received` and lets `flush` write; both may call back. What an error is, is the
client's to say (E): it makes one of a google.rpc.Status.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from numpy.typing import NDArray

from deltaline import link
from deltaline.arena import Arena, map_sealed
from deltaline.wire import Buffer, write_pieces

E = TypeVar("E")
Array: TypeAlias = NDArray[Any]

Write: TypeAlias = Callable[[Sequence[Buffer]], bool]
"""Writes a packet, given in pieces. False when the socket is full: nothing is written."""

Content: TypeAlias = bytes | tuple[Buffer, ...] | Array
"""A message; pieces that are one behind each other, which have to stay as they are until it was written; or what was
written into a `room` of the connection's, uint8 [n]."""

_NO_HEAD: dict[str, Any] = {}
_MAX_TIMEOUT_S = 1e9
_MAX_BODY = link.MAX_PACKET_BYTES - link.ENVELOPE.size
# Most bytes of a call's path, metadata and client together: the envelope has 16 bits for each.
_MAX_HEAD = (1 << 16) - 1


class Region(NamedTuple):
    """Link memory: its number, and the mapping."""

    number: int
    mapping: mmap.mmap


class LinkCall(Generic[E]):
    """A call. on_message: gets each message that comes. on_end: gets its error, None where it ended well; called once,
    and nothing is called after it. hold_s: for how long a front end keeps the error back, as the server says."""

    def __init__(
        self,
        head: dict[str, Any],
        on_message: Callable[[bytes], object],
        on_end: Callable[[E | None], object],
    ) -> None:
        self.head, self.on_message, self.on_end = head, on_message, on_end
        # Its number, from when it goes: calls that wait for memory are overtaken, and numbers have to rise. 0 before.
        self.number = 0
        self.head_bytes = len(head["method"]) + len(head["metadata"]) + len(head["client"])
        # Messages, None for the mere end, each with its flags.
        self.outbox: deque[tuple[Content | None, int]] = deque()
        self.credit = link.STREAM_MESSAGES
        self.is_over, self.hold_s = False, 0.0
        # The body and flags of the first message in the outbox, once they are made: it may hold memory.
        self.body: tuple[bytes, int] | None = None
        # The size of a reply that the server has asked for memory for.
        self.room_bytes = 0


class Conversation(Generic[E]):
    """The calls of a connection. For one thread at a time; `error` is set when it is over."""

    def __init__(
        self, message_bytes: int, read_status: Callable[[status_pb2.Status], E], request_bytes: int = 0
    ) -> None:
        """message_bytes: most bytes of a message, as the server has told. read_status: makes the error of a status.
        request_bytes: of link memory for messages to the server, where more is wanted than two of the largest need:
        one is written while the server copies the other out."""
        self._read_status = read_status
        self.message_bytes = message_bytes
        self._reply_bytes = link.memory_bytes(message_bytes) // 2
        self._memory_bytes = self._reply_bytes + max(request_bytes, 2 * self._reply_bytes)
        self._calls: dict[int, LinkCall[E]] = {}
        # What waits to be sent: calls with messages, and packets that go ahead of them.
        self.unsent: dict[LinkCall[E], None] = {}
        self.control: deque[bytes] = deque()
        self._waiting_for_room: list[LinkCall[E]] = []
        self._makers: dict[int, Callable[[Region | E], object]] = {}
        self._last = 0
        # Link memory: its number, the part of messages to the server, and that of replies. The server may take no more
        # messages before a reply is gone, so these must not fill what replies need.
        self._arenas: tuple[int, Arena, Arena] | None = None
        self._is_arena_asked = False
        # Whether the server gave no memory for messages: it may have some later, and other ways need none.
        self.lacks_memory = False
        # Memory that the server may still read or write, by offset: until it gives it back, or a reply in it.
        self._placed: dict[int, Array] = {}
        self.error: E | None = None

    # -- out -------------------------------------------------------------------------------------------------------

    def begin(
        self,
        path: str,
        on_message: Callable[[bytes], object],
        on_end: Callable[[E | None], object],
        *,
        timeout_s: float | None = None,
        metadata: link.Metadata | None = None,
        client: bytes = b"",
    ) -> LinkCall[E]:
        """Begin a call of a connection that is not over; its first `send` goes with it. timeout_s: None for none.
        client: who it is from, where a front end says so."""
        amount = 0 if timeout_s is None else round(min(max(timeout_s, 1e-6), _MAX_TIMEOUT_S) * 1e6)
        head = {"amount": amount, "method": path.encode(), "metadata": link.pack_metadata(metadata), "client": client}
        return LinkCall(head, on_message, on_end)

    def send(self, call: LinkCall[E], message: Content | None, *, is_last: bool = False) -> None:
        """Let a message go with the next `flush`; None for the mere end. Of a call that is over, nothing goes. Raises
        ValueError for an array that is no `room`."""
        if call.is_over:
            return
        if isinstance(message, np.ndarray):
            self._place(message)
        flags = (link.LAST if is_last else 0) | (link.EMPTY if message is None else 0)
        call.outbox.append((message, flags))
        self.unsent[call] = None

    def room(self, size: int) -> Array | None:
        """An array uint8 [size] in link memory, for a message that needs no copy then. None while there is none: memory
        is asked for with the next `flush`."""
        return None if self.error is not None else self._memory(size)

    def cancel(self, call: LinkCall[E]) -> None:
        """Give a call up: nothing is called back for it any more."""
        if not call.is_over:
            self._forget(call)
            if call.number:
                self.control.append(link.pack(link.CANCEL, call.number))

    def took(self, call: LinkCall[E], num_bytes: int) -> None:
        """A front end's client has read so many bytes of a call's replies."""
        self.control.append(link.pack(link.TAKEN, call.number, amount=num_bytes))

    def ask_memory(self, size: int, on_done: Callable[[Region | E], object]) -> None:
        """Ask for link memory of at least so many bytes. on_done: may raise LinkError, which ends the connection."""
        if self.error is not None:
            on_done(self.error)
            return
        self._last += 1
        self._makers[self._last] = on_done
        self.control.append(link.pack(link.MEMORY, self._last) + link.Place(0, 0, size).packed())

    def flush(self, write: Write) -> bool:
        """Write what can go now. False when the socket was full."""
        while self.control:
            if not write((self.control[0],)):
                return False
            self.control.popleft()
        for call in list(self.unsent):
            while call.outbox and call.credit:
                call.body = call.body or self._body(call)
                if call.body is None:
                    break  # until there is memory
                body, flags = call.body
                number, kind, head = call.number, link.MESSAGE, _NO_HEAD
                if not number:
                    number, kind, head = self._last + 1, link.CALL, call.head
                if not write((link.pack(kind, number, flags=flags, **head), body)):
                    return False
                if kind == link.CALL:
                    self._last = call.number = number
                    self._calls[number] = call
                call.body = None
                call.credit -= call.outbox.popleft()[0] is not None
            if not call.outbox:
                self.unsent.pop(call, None)
        # What memory was asked for just now goes as well.
        return not self.control or self.flush(write)

    def _body(self, call: LinkCall[E]) -> tuple[bytes, int] | None:
        """The body of a call's next message, and its flags; None while there is no memory for it, or when it is too
        large, or what stands before it, which ends the call."""
        if call.head_bytes > _MAX_HEAD:
            why = f"expected a path, metadata and client of at most {_MAX_HEAD} bytes, got {call.head_bytes}"
            self._refuse(call, code_pb2.RESOURCE_EXHAUSTED, why)
            return None
        message, flags = call.outbox[0]
        if isinstance(message, np.ndarray):
            pieces: tuple[Buffer, ...] = (message.data,)
        else:
            pieces = message if isinstance(message, tuple) else (message or b"",)
        num_bytes = sum(map(len, pieces))
        if num_bytes > self.message_bytes:
            why = f"expected a message of at most {self.message_bytes} bytes, got {num_bytes}"
            self._refuse(call, code_pb2.RESOURCE_EXHAUSTED, why, "MESSAGE_TOO_LARGE")
            return None
        if num_bytes > _MAX_BODY - (0 if call.number else call.head_bytes):
            array = message if isinstance(message, np.ndarray) else self._memory(num_bytes)
            if array is None:
                return None
            if array is not message:
                write_pieces(pieces, array)
            place = self._place(array)
            self._placed[place.offset] = array
            return place.packed(), flags | link.PLACED
        return b"".join(pieces), flags

    def _memory(self, size: int, *, for_reply: bool = False) -> Array | None:
        """An array uint8 [size] in link memory, None while there is none."""
        if self._arenas is None:
            if not self._is_arena_asked:
                self._is_arena_asked = True
                self.ask_memory(self._memory_bytes, self._take_arena)
            return None
        _, requests, replies = self._arenas
        return (replies if for_reply else requests).empty((size,), "u1")

    def _place(self, array: Array) -> link.Place:
        """Where an array lies in link memory. Raises ValueError unless it is uint8 [n] there."""
        offset = None if self._arenas is None else self._arenas[1].offset(array)
        if self._arenas is None or offset is None or array.dtype != np.uint8 or array.ndim != 1:
            got = f"{array.dtype} {list(array.shape)}{' elsewhere' if offset is None else ''}"
            raise ValueError(f"message: expected uint8 [n] of this connection's room, got {got}")
        return link.Place(self._arenas[0], offset, len(array))

    def _take_arena(self, made: Region | E) -> None:
        """Raises LinkError."""
        if isinstance(made, Region):
            if len(made.mapping) < self._memory_bytes:
                raise link.LinkError(f"expected memory of {self._memory_bytes} bytes, got {len(made.mapping)}")
            replies = Arena(made.mapping, 0, self._reply_bytes)
            self._arenas = made.number, Arena(made.mapping, self._reply_bytes), replies
        elif self.error is None and self._memory_bytes > link.memory_bytes(self.message_bytes):
            self._memory_bytes = link.memory_bytes(self.message_bytes)  # so much is needed, more was wanted
            self.ask_memory(self._memory_bytes, self._take_arena)
        else:
            self.lacks_memory = True
            why = made.message if isinstance(made, status_pb2.Status) else made
            self.end(code_pb2.UNAVAILABLE, f"no link memory is to be had: {why}")

    # -- in --------------------------------------------------------------------------------------------------------

    def received(self, packet: memoryview, fds: Sequence[int]) -> None:
        """Take a packet, and the files that came with it, which are closed here."""
        try:
            self._take(packet, fds)
        except (link.LinkError, DecodeError, OSError, ValueError) as error:
            self.end(code_pb2.UNKNOWN, f"the server's packet can't be read: {error}")
        finally:
            for fd in fds:
                os.close(fd)
        if self._waiting_for_room:
            self._give_room()

    def _take(self, packet: memoryview, fds: Sequence[int]) -> None:
        """Raises LinkError, DecodeError, OSError, ValueError."""
        envelope = link.read(packet)
        kind, number, body = envelope.kind, envelope.call, packet[envelope.body_at :]
        if kind in (link.TAKEN, link.MESSAGE) and envelope.flags & link.PLACED:
            place = link.Place.read(body)
            array = self._placed.pop(place.offset, None)
            if kind == link.MESSAGE:
                body = _read(array, place)
        if kind == link.GOODBYE:
            self.end(code_pb2.UNAVAILABLE, f"the server ended the link: {bytes(body).decode(errors='replace')}")
        elif number in self._makers:
            self._take_memory(self._makers.pop(number), kind, body, fds)
        elif (call := self._calls.get(number)) is not None:
            self._take_of_call(call, envelope, body)

    def _take_of_call(self, call: LinkCall[E], envelope: link.Envelope, body: memoryview) -> None:
        """Raises LinkError, DecodeError."""
        if envelope.kind == link.MESSAGE:
            on_message, on_end = call.on_message, self._forget(call) if envelope.flags & link.LAST else None
            on_message(bytes(body))
            if on_end is not None:
                on_end(None)
        elif envelope.kind == link.STATUS:
            status = status_pb2.Status.FromString(bytes(body))
            call.hold_s = envelope.amount * 1e-6
            self._forget(call)(self._read_status(status) if status.code else None)
        elif envelope.kind == link.TAKEN:
            call.credit += envelope.amount
        elif envelope.kind == link.ROOM:
            call.room_bytes = link.Place.read(body).size
            self._waiting_for_room.append(call)
        else:
            raise link.LinkError(f"expected a packet of a server, got the kind {envelope.kind}")

    def _take_memory(
        self, on_done: Callable[[Region | E], object], kind: int, body: memoryview, fds: Sequence[int]
    ) -> None:
        if kind == link.STATUS:
            on_done(self._read_status(status_pb2.Status.FromString(bytes(body))))
        elif kind == link.MEMORY and len(fds) <= 1:
            place = link.Place.read(body)
            try:
                if not fds:  # the kernel drops what it has no number for
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                on_done(Region(place.region, map_sealed(fds[0], place.size)))
            except OSError as error:
                why = f"this process can't map it: {error.strerror}"
                on_done(self._read_status(status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message=why)))
        else:
            raise link.LinkError("expected memory with its file")

    def _give_room(self) -> None:
        """Give replies that wait the memory that there is."""
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for call in waiting:
            if call.is_over:
                continue
            if call.room_bytes > self._reply_bytes:
                why = f"the reply has {call.room_bytes} bytes, more than this link carries"
                self._refuse(call, code_pb2.UNKNOWN, why)
                continue
            room = self._memory(call.room_bytes, for_reply=True)
            if room is not None:
                place = self._place(room)
                self._placed[place.offset] = room
                self.control.append(link.pack(link.ROOM, call.number) + place.packed())
            else:
                self._waiting_for_room.append(call)

    def _refuse(self, call: LinkCall[E], code: int, why: str, reason: str = "") -> None:
        """End a call on this side. code: of google.rpc. reason: of the ErrorInfo that a server would send, if any."""
        on_end = call.on_end
        self.cancel(call)
        status = status_pb2.Status(code=code, message=why)
        if reason:
            status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="deltaline"))
        on_end(self._read_status(status))

    def _forget(self, call: LinkCall[E]) -> Callable[[E | None], object]:
        """A call is over; return what is to be told of it. The call lets go of that, which may refer to the call: such
        a circle waits for the garbage collector."""
        on_end, call.on_message, call.on_end = call.on_end, _nothing, _nothing
        call.is_over = True
        self._calls.pop(call.number, None)
        self.unsent.pop(call, None)
        if call.body is not None and call.body[1] & link.PLACED:
            self._placed.pop(link.Place.read(call.body[0]).offset, None)
        return on_end

    def end(self, code: int, why: str) -> None:
        """The connection is over, for a reason with a code of google.rpc. Idempotent."""
        self.fail(self._read_status(status_pb2.Status(code=code, message=why)))

    def fail(self, error: E) -> None:
        """The connection is over: all calls end with the error. Idempotent."""
        if self.error is None:
            self.error = error
            for call in {**dict.fromkeys(self._calls.values()), **self.unsent}:
                self._forget(call)(error)
            makers, self._makers = self._makers, {}
            for on_done in makers.values():
                on_done(error)
            # The server has let go of its side; what refers to an error's frames may keep this one for long.
            self._arenas, self._placed = None, {}


def _nothing(_: object) -> None:
    """What is called back for a call that is over."""


def _read(array: Array | None, place: link.Place) -> memoryview:
    """A message in the memory that was given for it. Raises LinkError."""
    if array is None or place.size > len(array):
        raise link.LinkError("expected a message in the memory that was given for it")
    return array[: place.size].data
