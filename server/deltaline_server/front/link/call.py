"""One call of the link: what handlers get as their context, and what runs them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, cast

import grpc
from google.rpc import status_pb2
from grpc.aio import EOF, AbortError

from deltaline import link
from deltaline.wire import Buffer
from deltaline_server.errors import RequestError
from deltaline_server.front import replies
from deltaline_server.front.interceptor import Context, bug
from deltaline_server.front.link.held import Share
from deltaline_server.front.trust.peer import Peer
from deltaline_server.memory.lent import Lent

# A front end is told of the messages that were taken after so many bytes: half of what it sends ahead of that.
TOLD_BYTES = link.STREAM_MESSAGES // 4 * link.MAX_PACKET_BYTES

_DETAILS = "grpc-status-details-bin"


class Line(Protocol):
    """What a call needs of its connection."""

    def read_message(self, call: Call, message: bytes | link.Place, num_taken: int) -> Buffer | Lent:
        """The bytes of a message that came; num_taken: what the client may send for it. Raises RequestError."""

    def put_back(self, call: Call, place: link.Place, num_taken: int) -> None:
        """A message that was lent was given back."""

    async def reply(self, call: Call, body: bytes, flags: int) -> None:
        """Send a message of the call, and return once its reader has room for another."""

    async def hold(self, call: Call, seconds: float) -> None:
        """Keep the refusal of a call back, or let who gets it do so."""

    def end_call(self, call: Call, status: status_pb2.Status) -> None:
        """Send the call's status, its last word."""


class Call:
    """A call, from its packet to its status. share: what it makes the server hold counts to it. room: set while a reply
    waits for the client's Place. in_hand_bytes: of the message that the handler has, as counted. hold_s: for how long a
    front end keeps its status back.

    To handlers it is what grpc.aio's context is to them: `read`, `abort`, `time_remaining` and their kin.
    """

    reply_turns = 1
    """Turns of the event loop that a reply takes: whoever waits for it writes it to the socket."""

    def __init__(
        self,
        line: Line,
        number: int,
        handler: Any,
        metadata: link.Metadata,
        timeout_us: int,
        client: Peer,
        share: Share,
        reads_in_place: bool,
    ) -> None:
        """handler: one that the Interceptor has wrapped. client: who it is from. reads_in_place: whether messages are
        lent to it, and not copied."""
        self._line, self.number, self._client, self.share = line, number, client, share
        self._handler, self._metadata = handler, metadata
        self._deadline_s = time.monotonic() + timeout_us * 1e-6 if timeout_us else None
        self._messages: deque[bytes | link.Place] = deque()
        self._has_all = False
        self._came: asyncio.Future[None] | None = None
        self._num_taken = self._bytes_taken = 0
        self.in_hand_bytes, self.hold_s = 0, 0.0
        # Where messages lie that are lent to the handler.
        self.reads_in_place, self._lent = reads_in_place, dict[object, link.Place]()
        # Where requests lay that were copied out, for the replies to them; others have as many as they like.
        self.has_reply_each = handler is not None and handler.request_streaming == handler.response_streaming
        self.kept = deque[link.Place]()
        self._code, self._text, self._trailing = grpc.StatusCode.OK, "", cast("Sequence[tuple[str, str | bytes]]", ())
        self.room: asyncio.Future[link.Place] | None = None
        self._unread_bytes = 0
        self._has_read: asyncio.Future[None] | None = None
        self.is_over = False

    # -- what comes from the client --------------------------------------------------------------------------------

    def add(self, message: bytes | link.Place | None, is_last: bool) -> None:
        """A message came, None for none, and perhaps the last one. Raises LinkError for one too many."""
        if self._has_all:
            raise link.LinkError(f"expected nothing more for call {self.number}, which had its last message")
        if message is not None:
            if len(self._messages) == link.STREAM_MESSAGES:
                raise link.LinkError(f"expected at most {link.STREAM_MESSAGES} messages that are not taken")
            self._messages.append(message)
        self._has_all = is_last
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    def was_read(self, num_bytes: int) -> None:
        """The front end's client has read so many bytes of replies."""
        self._unread_bytes -= num_bytes
        if self._has_read is not None and not self._has_read.done():
            self._has_read.set_result(None)

    async def until_read(self, num_bytes: int) -> None:
        """A reply of so many bytes went to a front end: wait until its client has few to read."""
        self._unread_bytes += num_bytes
        while self._unread_bytes >= link.UNREAD_BYTES:
            self._has_read = asyncio.get_running_loop().create_future()
            await self._has_read

    def drop(self) -> tuple[int, list[link.Place]]:
        """Let go of the messages: the bytes that count, of those that were copied, the one in hand and what is lent,
        and where those lie that were not."""
        lent = list(self._lent.values())
        num_bytes = self.in_hand_bytes + sum(len(message) for message in self._messages if isinstance(message, bytes))
        places = lent + [message for message in self._messages if isinstance(message, link.Place)]
        self._messages.clear()
        self._lent.clear()
        return num_bytes + sum(place.size for place in lent), places

    def lend(self, view: memoryview, place: link.Place, num_taken: int) -> Lent:
        """Let the handler have a message in its place; its bytes count until it is given back, or the call is over."""
        key = object()
        self._lent[key] = place

        def give_back() -> None:
            if self._lent.pop(key, None) is not None:
                self.share.give_back(place.size)
                self._line.put_back(self, place, num_taken)

        return Lent(view, give_back)

    async def run(self) -> None:
        """Let the handler answer."""
        handler, context = self._handler, cast(Context, self)
        try:
            if handler.response_streaming:
                if handler.request_streaming:
                    responses = handler.stream_stream(None, context)
                else:
                    responses = handler.unary_stream(await self._only(), context)
                async with aclosing(responses):
                    async for response in responses:
                        await self._line.reply(self, response, 0)
                        del response
                self._line.end_call(self, status_pb2.Status())
                return
            if handler.request_streaming:
                response = await handler.stream_unary(None, context)
            else:
                response = await handler.unary_unary(await self._only(), context)
            await self._line.reply(self, response, link.LAST)
        except AbortError:
            self._line.end_call(self, self._status())
        except RequestError as error:
            self._line.end_call(self, replies.status(error.refusal))
        except Exception as error:
            self._line.end_call(self, replies.status(bug(error)))

    async def _only(self) -> bytes:
        """The one message of a call that has one."""
        body = await self.read()
        if body is EOF or not self._has_all or self._messages:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, "expected one message, the last one")
        return cast(bytes, body)

    def _status(self) -> status_pb2.Status:
        made = dict(self._trailing).get(_DETAILS)
        if isinstance(made, bytes):
            return status_pb2.Status.FromString(made)
        return status_pb2.Status(code=self._code.value[0], message=self._text)

    # -- the context -----------------------------------------------------------------------------------------------

    async def read(self) -> Any:
        """The next message, or EOF behind the last. The handler is done with the one before, unless it is lent."""
        self.share.give_back(self.in_hand_bytes)
        self.in_hand_bytes = 0
        while not self._messages:
            if self._has_all:
                return EOF
            self._came = asyncio.get_running_loop().create_future()
            await self._came
        message = self._messages.popleft()
        self.in_hand_bytes = len(message) if isinstance(message, bytes) else 0
        self._num_taken += 1
        self._bytes_taken += self.in_hand_bytes
        # A place goes back in a packet in any case; else it takes one of its own.
        is_due = self._num_taken >= link.STREAM_MESSAGES // 2 or self._bytes_taken >= TOLD_BYTES
        if isinstance(message, bytes) and not is_due:
            return self._line.read_message(self, message, 0)
        num_taken, self._num_taken, self._bytes_taken = self._num_taken, 0, 0
        return self._line.read_message(self, message, num_taken)

    async def hold(self, seconds: float) -> None:
        """Keep the call's refusal back for so long."""
        await self._line.hold(self, seconds)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        """End the call with a status. Raises AbortError."""
        self._code, self._text, self._trailing = code, details, trailing_metadata
        raise AbortError

    def code(self) -> int:
        """The number of the status code that `abort` was given."""
        return int(self._code.value[0])

    def peer(self) -> str:
        """Who is at the other end."""
        return self._client.address

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """What is proven of it."""
        return self._client.proven

    def invocation_metadata(self) -> link.Metadata:
        """What came with the call."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline, 0 or more; None where it has none."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())
