"""One connection of the link: its calls, and its memory. Whatever is wrong with it ends it alone."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.rpc import code_pb2, status_pb2

from deltaline import link
from deltaline.wire import Buffer
from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.front import replies
from deltaline_server.front.link.call import Call
from deltaline_server.front.link.held import Held
from deltaline_server.front.link.memory import ClientMemory
from deltaline_server.front.link.methods import IN_PLACE
from deltaline_server.front.link.packet_socket import PacketSocket
from deltaline_server.front.trust.peer import Peer
from deltaline_server.log import event
from deltaline_server.memory.lent import Lent
from deltaline_server.memory.regions import Regions
from deltaline_server.scheduling.observer import Observer

# Calls of a front end at a time: they are those of all its clients.
MAX_FRONT_END_CALLS = 16_384
# The part of a front end's memory for requests that these may keep for their replies.
KEPT_PART = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """What all connections share. find: the wrapped handler of a method, None for an unknown one. message_bytes: most
    bytes of a request. regions: link memory. buffer: room for a packet, while it is taken."""

    find: Callable[[bytes], Any]
    regions: Regions
    held: Held
    observer: Observer
    server_epoch: int
    message_bytes: int
    buffer: memoryview


class Connection:
    """A client's socket, or a front end's. It belongs to the event loop; `end` ends it, and its calls with it.

    A front end says whom its calls are from. None of its clients should suffer for another, so what a call makes the
    server hold counts to the call, and its messages don't stay in memory that all of them need, but for a part of it:
    there the place of a request waits for its reply, which saves a reply a question for room and the answer.
    """

    def __init__(
        self,
        served: Served,
        connected: socket.socket,
        peer: Peer,
        on_end: Callable[[Connection], None],
        *,
        is_front_end: bool = False,
    ) -> None:
        self._peer, self._served, self._on_end = peer, served, on_end
        self._is_front_end = is_front_end
        self._max_calls = MAX_FRONT_END_CALLS if is_front_end else link.MAX_CALLS
        self._kinds = {link.MESSAGE, link.CANCEL, link.ROOM} | ({link.TAKEN} if is_front_end else set())
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Call] = {}
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self._timers: dict[Call, asyncio.TimerHandle] = {}
        self._last_call = 0
        self._kept_bytes, self._most_kept_bytes = 0, link.memory_bytes(served.message_bytes) // KEPT_PART
        self._share = served.held.join(self.end)
        self._socket = PacketSocket(connected, served.buffer, self._share, self._take, self.end)
        self._memory = ClientMemory(served.regions, self._socket, peer.address)
        self._is_over = self._is_stopping = False

    def start(self) -> None:
        """Greet the client, and take what it sends."""
        self._socket.start()
        welcome = link.Welcome(link.VERSION, self._served.server_epoch, self._served.message_bytes)
        self._socket.write(link.pack(link.WELCOME), welcome.packed())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Its calls that are not over."""
        return list(self._tasks.values())

    def stop(self) -> None:
        """Take no new call."""
        self._is_stopping = True

    def end(self, why: str) -> None:
        """Close it, saying why; "" where the client did. Its calls are cancelled, its memory is given back."""
        if self._is_over:
            return
        self._is_over = True
        self._socket.close(link.pack(link.GOODBYE) + why.encode() if why else b"")
        if why:
            event(_log, "link connection ended", peer=self._peer.address, why=why)
        for call in list(self._calls.values()):
            self._forget(call)
        for task in self._tasks.values():
            task.cancel()
        self._memory.end()
        self._share.leave()
        self._on_end(self)

    # -- what comes ------------------------------------------------------------------------------------------------

    def _take(self, packet: memoryview) -> None:
        """Do what a packet says. Raises LinkError."""
        envelope = link.read(packet)
        kind, number = envelope.kind, envelope.call
        if envelope.client and not self._is_front_end:
            raise link.LinkError("expected no asserted client on a socket that clients connect to")
        if kind == link.CALL:
            if number <= self._last_call:
                raise link.LinkError(f"expected a call's number above {self._last_call}, got {number}")
            self._last_call = number
            self._begin(envelope, packet)
            return
        if kind == link.MEMORY:
            self._memory.ask(number, link.Place.read(packet[envelope.body_at :]).size)
            return
        if kind not in self._kinds:
            raise link.LinkError(f"expected a packet of a client, got the kind {kind}")
        call = self._calls.get(number)
        if call is None:  # over, and the client did not know yet
            if number > self._last_call:
                raise link.LinkError(f"expected a call that has begun, got {number}")
            if kind == link.ROOM or (kind == link.MESSAGE and envelope.flags & link.PLACED):
                self._let_go(number, link.Place.read(packet[envelope.body_at :]))
        elif kind == link.MESSAGE:
            call.add(self._message(call, envelope, packet), bool(envelope.flags & link.LAST))
        elif kind == link.TAKEN:
            call.was_read(envelope.amount)
        elif kind == link.CANCEL:
            self._tasks[call].cancel()  # its status says when memory for its reply is no longer written to
        elif call.room is None or call.room.done():
            raise link.LinkError(f"expected no room for a reply of call {number}, which asked for none")
        else:
            call.room.set_result(link.Place.read(packet[envelope.body_at :]))

    def _begin(self, envelope: link.Envelope, packet: memoryview) -> None:
        """Begin a call. Raises LinkError."""
        handler, timeout_us = self._served.find(envelope.method), envelope.amount
        unreadable = ""
        try:
            metadata = link.read_metadata(envelope.metadata)
        except link.LinkError as error:
            if not self._is_front_end:
                raise
            metadata, unreadable = (), str(error)  # by whatever one of its clients sent: the others go on
        client, share = self._peer, self._share
        if self._is_front_end:
            client = Peer.read(envelope.client)
            share = self._served.held.join(lambda why: self._overfull(call, why), "call")
        in_place = envelope.method in IN_PLACE
        call = Call(self, envelope.call, handler, metadata, timeout_us, client, share, in_place)
        try:
            call.add(self._message(call, envelope, packet), bool(envelope.flags & link.LAST))
        except Exception:
            self._drop(call)
            raise
        if call.is_over:
            return  # its first message was too much
        if handler is None:
            self._refuse(call, status_pb2.Status(code=code_pb2.UNIMPLEMENTED, message="the method is not known"))
        elif unreadable:
            self._refuse(call, status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=unreadable))
        elif self._is_stopping:
            self._refuse(call, self._counted(Refusal(Reason.STOPPING, "the server is stopping")))
        elif len(self._tasks) == self._max_calls:
            why = f"{self._max_calls} calls of this connection are in flight, which is the most"
            self._refuse(call, self._counted(Refusal(Reason.TOO_MANY_IN_FLIGHT, why, retry_after_s=0.01)))
        else:
            self._calls[call.number] = call
            self._tasks[call] = task = self._loop.create_task(call.run())
            task.add_done_callback(lambda _: self._done(call))
            if timeout_us:
                self._timers[call] = self._loop.call_later(timeout_us * 1e-6, self._expire, call)

    def _message(self, call: Call, envelope: link.Envelope, packet: memoryview) -> bytes | link.Place | None:
        """What a packet has for a handler. Raises LinkError."""
        if envelope.flags & link.EMPTY:
            return None
        body: memoryview | bytes = packet[envelope.body_at :]
        if envelope.flags & link.PLACED:
            place = link.Place.read(body)
            if not self._is_front_end:
                return place
            if place.size > self._served.message_bytes:
                raise link.LinkError(f"expected at most {self._served.message_bytes} bytes, got {place.size}")
            body = self._served.regions.copy_out(*place, self._peer.address)
            self._keep(call, place)
        call.share.take(len(body))
        if self._is_over:
            raise link.LinkError("the connection was ended: it held the most")
        return None if call.is_over else bytes(body)

    def _overfull(self, call: Call, why: str) -> None:
        """End a call, which may have no task yet, or just be taking what is too much."""
        self._drop(call)  # first: what is written here may be held too, and ends another then
        self.end_call(call, status_pb2.Status(code=code_pb2.UNAVAILABLE, message=why))
        if call in self._tasks:
            self._tasks[call].cancel()

    def read_message(self, call: Call, message: bytes | link.Place, num_taken: int) -> Buffer | Lent:
        """The bytes of a message; num_taken: what the client may send for it. Raises RequestError."""
        if isinstance(message, bytes):
            if num_taken:
                self._socket.write(link.pack(link.TAKEN, call.number, amount=num_taken))
            return message
        limit, lent = self._served.message_bytes, None
        try:
            if message.size > limit:
                raise RequestError(
                    Reason.MESSAGE_TOO_LARGE, f"expected a message of at most {limit} bytes, got {message.size}"
                )
            call.in_hand_bytes = message.size
            call.share.take(message.size)
            if self._is_over:
                raise asyncio.CancelledError  # as it is: it held the most
            if not call.reads_in_place:
                return self._served.regions.copy_out(*message, self._peer.address)
            lent = call.lend(self._served.regions.view(*message, self._peer.address), message, num_taken)
            call.in_hand_bytes = 0
            return lent
        finally:
            if lent is None:
                self._let_go(call.number, message, num_taken)

    def put_back(self, call: Call, place: link.Place, num_taken: int) -> None:
        """A message that was lent was given back."""
        self._let_go(call.number, place, num_taken)

    def _let_go(self, number: int, place: link.Place, num_taken: int = 0) -> None:
        """Tell the client that the place of a call's message is its own again."""
        self._socket.write(link.pack(link.TAKEN, number, amount=num_taken, flags=link.PLACED), place.packed())

    def _keep(self, call: Call, place: link.Place) -> None:
        """Keep the place of a request that was copied out for its reply, or let go of it."""
        if call.has_reply_each and self._kept_bytes + place.size <= self._most_kept_bytes:
            call.kept.append(place)
            self._kept_bytes += place.size
        else:
            self._let_go(call.number, place)

    def _take_kept(self, call: Call) -> link.Place:
        """The place that was kept for a call's next reply; it is the caller's to give back."""
        self._kept_bytes -= call.kept[0].size
        return call.kept.popleft()

    def _drop(self, call: Call) -> None:
        """Let go of what a call's handler did not read or answer. Of a front end's call it may be done twice."""
        num_bytes, places = call.drop()
        if call.share is self._share:
            call.share.give_back(num_bytes)
        else:
            call.share.leave()
        while call.kept:
            places.append(self._take_kept(call))
        for place in places:
            self._let_go(call.number, place)

    # -- what goes -------------------------------------------------------------------------------------------------

    async def reply(self, call: Call, reply: replies.Reply, flags: int) -> None:
        """Send a message of a call, and return once its reader has room for another. Raises RequestError."""
        pieces: replies.Pieces = [reply] if isinstance(reply, bytes) else reply
        num_bytes = sum(map(len, pieces))
        is_large = num_bytes + link.ENVELOPE.size > link.MAX_PACKET_BYTES
        kept = self._take_kept(call) if call.kept else None
        if kept is not None and (not is_large or kept.size < num_bytes):
            self._let_go(call.number, kept)
            kept = None
        if is_large:
            pieces, flags = [await self._placed(call, pieces, num_bytes, kept)], flags | link.PLACED
        if call.is_over:
            return
        if flags & link.LAST:
            self._forget(call)
        self._socket.write(link.pack(link.MESSAGE, call.number, flags=flags), *pieces)
        if flags & link.LAST:
            return
        await self._socket.drain()
        if self._is_front_end:
            await call.until_read(num_bytes)

    async def _placed(self, call: Call, pieces: replies.Pieces, num_bytes: int, kept: link.Place | None) -> bytes:
        """Write a message where its request lay, or, where that was not kept, into memory that the client names for it;
        return the Place. Raises RequestError."""
        is_used = False
        room: asyncio.Future[link.Place] = self._loop.create_future()
        call.share.take(num_bytes)
        try:
            if kept is None:
                call.room = room
                self._socket.write(link.pack(link.ROOM, call.number), link.Place(0, 0, num_bytes).packed())
            else:
                room.set_result(kept)
            region, offset, _ = await room
            place = link.Place(region, offset, num_bytes)
            self._served.regions.copy_in(place.region, place.offset, pieces, self._peer.address)
            is_used = not call.is_over
        finally:
            call.share.give_back(num_bytes)
            if not is_used and room.done() and not room.cancelled():
                self._let_go(call.number, room.result())
        return place.packed()

    async def hold(self, call: Call, seconds: float) -> None:
        """Keep the refusal of a call back; a front end does so itself, and here nothing of the call remains."""
        if self._is_front_end:
            call.hold_s = seconds
        else:
            await asyncio.sleep(seconds)

    def end_call(self, call: Call, status: status_pb2.Status) -> None:
        """Send a call's status, its last word."""
        if not call.is_over:
            body = status.SerializeToString()
            if len(body) + link.ENVELOPE.size > link.MAX_PACKET_BYTES:
                body = status_pb2.Status(code=status.code, message=status.message[:1000]).SerializeToString()
            self._forget(call)  # first: what waits in the socket is held, which may end this call
            self._socket.write(link.pack(link.STATUS, call.number, amount=round(call.hold_s * 1e6)), body)

    def _refuse(self, call: Call, status: status_pb2.Status) -> None:
        """End a call whose handler has not begun."""
        self.end_call(call, status)
        self._drop(call)

    def _counted(self, refusal: Refusal) -> status_pb2.Status:
        self._served.observer.refused(refusal.reason, 1)
        return replies.status(refusal)

    def _expire(self, call: Call) -> None:
        """The call's deadline has passed."""
        self.end_call(call, status_pb2.Status(code=code_pb2.DEADLINE_EXCEEDED, message="the deadline has passed"))
        self._tasks[call].cancel()

    def _forget(self, call: Call) -> None:
        """Nothing more goes to or comes from the client for this call; its handler may still have to end."""
        call.is_over = True
        self._calls.pop(call.number, None)
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()

    def _done(self, call: Call) -> None:
        """The call's handler is over: of one that was cancelled, what it left goes back here."""
        del self._tasks[call]
        if not call.is_over:
            self.end_call(call, status_pb2.Status(code=code_pb2.CANCELLED, message="the call was cancelled"))
        self._drop(call)
