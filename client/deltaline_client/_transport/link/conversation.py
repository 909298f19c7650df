"""What is said on one connection of the link, without the socket: calls that go out, answers that come in.

Whoever has the socket hands packets to `received` and lets `flush` write; both may call back.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from deltaline import link
from deltaline.wire import Buffer
from deltaline_client._arena import Arena, map_sealed
from deltaline_client._arrays import Array
from deltaline_client._exceptions import DeltalineError, ProtocolError, Unavailable
from deltaline_client._transport.flow import Method, Region
from deltaline_client._transport.statuses import from_status

Write: TypeAlias = Callable[[Sequence[Buffer]], bool]
"""Writes a packet, given in pieces. False when the socket is full: nothing is written."""

_MAX_TIMEOUT_S = 1e9
_MAX_BODY = link.MAX_PACKET_BYTES - link.ENVELOPE.size


class LinkCall:
    """A call. on_message: gets each message that comes. on_end: gets its error, None where it ended well; called once,
    and nothing is called after it."""

    def __init__(
        self,
        number: int,
        head: dict[str, Any],
        on_message: Callable[[bytes], object],
        on_end: Callable[[DeltalineError | None], object],
    ) -> None:
        self.number, self.head, self.on_message, self.on_end = number, head, on_message, on_end
        # Messages, None for the mere end, each with its flags.
        self.outbox: deque[tuple[bytes | None, int]] = deque()
        self.credit = link.STREAM_MESSAGES
        self.is_begun = self.is_over = False
        # The packet of the first message in the outbox, once it is made: it may hold memory.
        self.packet: tuple[bytes, bytes] | None = None
        self.packet_place: link.Place | None = None
        # The size of a reply that the server has asked for memory for.
        self.room_bytes = 0


class Conversation:
    """The calls of a connection. For one thread at a time; `error` is set when it is over."""

    def __init__(self, message_bytes: int) -> None:
        """message_bytes: most bytes of a message, as the server has told."""
        self._arena_bytes = 2 * message_bytes
        self._calls: dict[int, LinkCall] = {}
        # What waits to be sent: calls with messages, and packets that go ahead of them.
        self.unsent: dict[int, LinkCall] = {}
        self.control: deque[bytes] = deque()
        self._waiting_for_room: list[LinkCall] = []
        self._makers: dict[int, Callable[[Region | DeltalineError], object]] = {}
        self._last = 0
        self._arena: tuple[int, Arena] | None = None
        self._is_arena_asked = False
        # Memory that the server may still read or write, by offset: until it gives it back, or a reply in it.
        self._placed: dict[int, Array] = {}
        self.error: DeltalineError | None = None

    # -- out -------------------------------------------------------------------------------------------------------

    def begin(
        self,
        path: str,
        on_message: Callable[[bytes], object],
        on_end: Callable[[DeltalineError | None], object],
        *,
        timeout_s: float | None = None,
        metadata: link.Metadata | None = None,
    ) -> LinkCall:
        """Begin a call; its first `send` goes with it. timeout_s: None for none. Raises `error`."""
        if self.error is not None:
            raise self.error
        self._last += 1
        amount = 0 if timeout_s is None else round(min(max(timeout_s, 1e-6), _MAX_TIMEOUT_S) * 1e6)
        head = {"amount": amount, "method": path.encode(), "metadata": link.pack_metadata(metadata)}
        call = self._calls[self._last] = LinkCall(self._last, head, on_message, on_end)
        return call

    def send(self, call: LinkCall, message: bytes | None, *, is_last: bool = False) -> None:
        """Let a message go with the next `flush`; None for the mere end. Of a call that is over, nothing goes."""
        if call.is_over:
            return
        flags = (link.LAST if is_last else 0) | (link.EMPTY if message is None else 0)
        call.outbox.append((message, flags))
        self.unsent[call.number] = call

    def cancel(self, call: LinkCall) -> None:
        """Give a call up: nothing is called back for it any more."""
        if not call.is_over:
            self._forget(call)
            if call.is_begun:
                self.control.append(link.pack(link.CANCEL, call.number))

    def ask_memory(self, size: int, on_done: Callable[[Region | DeltalineError], object]) -> None:
        """Ask for link memory of at least so many bytes."""
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
        for call in list(self.unsent.values()):
            while call.outbox and call.credit:
                if call.packet is None:
                    call.packet = self._packet(call)
                if call.packet is None:
                    break  # until there is memory
                if not write(call.packet):
                    return False
                call.packet, call.packet_place, call.is_begun = None, None, True
                call.credit -= call.outbox.popleft()[0] is not None
            if not call.outbox:
                self.unsent.pop(call.number, None)
        # What memory was asked for just now goes as well.
        return not self.control or self.flush(write)

    def _packet(self, call: LinkCall) -> tuple[bytes, bytes] | None:
        """The packet of a call's next message; None while there is no memory for it."""
        message, flags = call.outbox[0]
        kind, head = (link.MESSAGE, {}) if call.is_begun else (link.CALL, call.head)
        body = message or b""
        if len(body) > _MAX_BODY - sum(map(len, (head.get("method", b""), head.get("metadata", b"")))):
            array = self._memory(len(body))
            if array is None or self._arena is None:
                return None
            array[:] = np.frombuffer(body, np.uint8)
            number, arena = self._arena
            call.packet_place = place = link.Place(number, arena.offset(array) or 0, len(body))
            self._placed[place.offset] = array
            body, flags = place.packed(), flags | link.PLACED
        return link.pack(kind, call.number, flags=flags, **head), body

    def _memory(self, size: int) -> Array | None:
        """An array uint8 [size] in link memory, None while there is none."""
        if self._arena is None:
            if not self._is_arena_asked:
                self._is_arena_asked = True
                self.ask_memory(max(self._arena_bytes, 2 * size), self._take_arena)
            return None
        return self._arena[1].empty((size,), "u1")

    def _take_arena(self, made: Region | DeltalineError) -> None:
        if isinstance(made, DeltalineError):
            # Other ways than this connection may have room.
            self.fail(Unavailable(f"the server gives no link memory: {made}"))
        else:
            self._arena = made[0], Arena(made[1])

    # -- in --------------------------------------------------------------------------------------------------------

    def received(self, packet: memoryview, fds: Sequence[int]) -> None:
        """Take a packet, and the files that came with it, which are closed here."""
        try:
            self._take(packet, fds)
        except (link.LinkError, DecodeError, OSError, ValueError) as error:
            self.fail(ProtocolError(f"the server's packet can't be read: {error}"))
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
            self.fail(Unavailable(f"the server ended the link: {bytes(body).decode(errors='replace')}"))
        elif number in self._makers:
            self._take_memory(self._makers.pop(number), kind, body, fds)
        elif (call := self._calls.get(number)) is not None:
            self._take_of_call(call, envelope, body)

    def _take_of_call(self, call: LinkCall, envelope: link.Envelope, body: memoryview) -> None:
        """Raises LinkError, DecodeError."""
        if envelope.kind == link.MESSAGE:
            is_last = envelope.flags & link.LAST
            if is_last:
                self._forget(call)
            call.on_message(bytes(body))
            if is_last:
                call.on_end(None)
        elif envelope.kind == link.STATUS:
            self._forget(call)
            status = status_pb2.Status.FromString(bytes(body))
            call.on_end(from_status(status) if status.code else None)
        elif envelope.kind == link.TAKEN:
            call.credit += envelope.amount
        elif envelope.kind == link.ROOM:
            call.room_bytes = link.Place.read(body).size
            self._waiting_for_room.append(call)
        else:
            raise link.LinkError(f"expected a packet of a server, got the kind {envelope.kind}")

    def _take_memory(
        self, on_done: Callable[[Region | DeltalineError], object], kind: int, body: memoryview, fds: Sequence[int]
    ) -> None:
        if kind == link.STATUS:
            on_done(from_status(status_pb2.Status.FromString(bytes(body))))
        elif kind == link.MEMORY and len(fds) == 1:
            place = link.Place.read(body)
            on_done((place.region, map_sealed(fds[0], place.size)))
        else:
            raise link.LinkError("expected memory with its file")

    def _give_room(self) -> None:
        """Give replies that wait the memory that there is."""
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for call in waiting:
            if call.is_over:
                continue
            if self._arena is not None and call.room_bytes > self._arena[1].size:
                self.cancel(call)
                call.on_end(ProtocolError(f"the reply has {call.room_bytes} bytes, more than this link carries"))
                continue
            room = self._memory(call.room_bytes)
            if room is not None and self._arena is not None:
                number, arena = self._arena
                place = link.Place(number, arena.offset(room) or 0, call.room_bytes)
                self._placed[place.offset] = room
                self.control.append(link.pack(link.ROOM, call.number) + place.packed())
            else:
                self._waiting_for_room.append(call)

    def _forget(self, call: LinkCall) -> None:
        call.is_over = True
        self._calls.pop(call.number, None)
        self.unsent.pop(call.number, None)
        if call.packet_place is not None:  # nobody was told of it
            self._placed.pop(call.packet_place.offset, None)

    def fail(self, error: DeltalineError) -> None:
        """The connection is over: all calls end with the error. Idempotent."""
        if self.error is None:
            self.error = error
            for call in list(self._calls.values()):
                self._forget(call)
                call.on_end(error)
            makers, self._makers = self._makers, {}
            for on_done in makers.values():
                on_done(error)


def _read(array: Array | None, place: link.Place) -> memoryview:
    """A message in the memory that was given for it. Raises LinkError."""
    if array is None or place.size > len(array):
        raise link.LinkError("expected a message in the memory that was given for it")
    return array[: place.size].data


def answer_of(method: Method[Any, Any], bodies: Sequence[bytes], error: DeltalineError | None) -> Any:
    """The response of a call that is over: it has one. Raises its error; ProtocolError for none that can be read."""
    if error is not None:
        raise error
    try:
        (body,) = bodies
        return method.response_type.FromString(body)
    except (ValueError, DecodeError) as wrong:
        raise ProtocolError("the reply can't be parsed") from wrong
