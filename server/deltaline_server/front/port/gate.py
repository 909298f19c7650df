"""What a gRPC port's clients may make this process hold: calls, requests half sent, replies that nobody reads.

gRPC's C core takes a reply whole, however slowly its client reads, and a request byte by byte, however slowly it comes.
So calls are counted until gRPC is done with them, and refused before anything is done for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc

from deltaline.sizes import spelled_bytes
from deltaline_server.errors import Code, Reason, RequestError
from deltaline_server.front.port.shares import Shares
from deltaline_server.front.port.slots import Slots

# Calls at a time; one client has half of them at most.
MAX_CALLS = 2048
# Of the health service, which has to answer then too; and of those that watch it, which stay.
MAX_PROBES = 256
MAX_WATCHES = 256
# Of those that are not let in, whose refusals are kept back: as many as have turns within the longest wait.
MAX_TURNED_AWAY = 1024
# Replies that gRPC has taken and clients have not, all together and of one client.
UNREAD_BYTES = 256 * 2**20
CLIENT_UNREAD_BYTES = 32 * 2**20
# Requests with one message that are received at a time, how long that may take, and how long where others wait.
RECEIVED = 64
REQUEST_S = 30.0
HURRIED_REQUEST_S = 1.0
# When to come again.
CALLS_RETRY_S = 0.1
UNREAD_RETRY_S = 0.5
PROBES = "/grpc.health."
WATCH = "/grpc.health.v1.Health/Watch"
_NOT_LET_IN = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


def too_much_unread() -> RequestError:
    """What a client is told that has too much to read."""
    limit = spelled_bytes(CLIENT_UNREAD_BYTES)
    message = f"replies wait to be read, of this connection up to {limit}, and less where others have many"
    return RequestError(Reason.REPLIES_UNREAD, message, retry_after_s=UNREAD_RETRY_S)


def when_done(call_back: Callable[[asyncio.Task[Any]], object]) -> None:
    """Have something called when gRPC is done with the call of this task, and has sent its reply. Not by the call's
    context, which that would refer to itself: such a circle waits for the garbage collector, and everybody for that."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(call_back)


class Gate:
    """Counts what clients have, connection by connection. Belongs to the event loop."""

    def __init__(self) -> None:
        self.calls, self.probes, self.watches = Shares(MAX_CALLS), Shares(MAX_PROBES), Shares(MAX_WATCHES)
        self.turned_away = Shares(MAX_TURNED_AWAY)
        self.unread = Shares(UNREAD_BYTES, CLIENT_UNREAD_BYTES)
        self.received = Slots(RECEIVED, HURRIED_REQUEST_S, REQUEST_S)

    def enter(self, method: str, context: Any) -> Entered:
        """Count a call until gRPC is done with it. Raises RequestError TOO_MANY_CALLS or REPLIES_UNREAD."""
        client = context.peer()
        calls = self.calls
        if method.startswith(PROBES):
            calls = self.watches if method == WATCH else self.probes
        if not calls.has_room(client):
            message = f"{calls.used} calls are in flight, the limit is {calls.limit}; one connection has half at most"
            raise RequestError(Reason.TOO_MANY_CALLS, message, retry_after_s=CALLS_RETRY_S)
        if calls is self.calls and self.turned_away.has_any(client) and not self.turned_away.has_room(client):
            message = "calls of this connection that were not let in wait for their turns, as many as may wait"
            raise RequestError(Reason.TOO_MANY_CALLS, message, retry_after_s=CALLS_RETRY_S)
        entered = Entered(self, calls, client)
        entered.check_unread()
        calls.take(client, 1)
        when_done(entered.leave)
        return entered


class Entered:
    """A call that is counted."""

    __slots__ = ("_calls", "_client", "_gate", "_held_until_s", "_unread_bytes")

    def __init__(self, gate: Gate, calls: Shares, client: str) -> None:
        self._gate, self._calls, self._client, self._unread_bytes = gate, calls, client, 0
        self._held_until_s = 0.0

    def check_unread(self) -> None:
        """Raises RequestError REPLIES_UNREAD where the client has too much to read."""
        if not self._gate.unread.has_room(self._client):
            raise too_much_unread()

    async def request(self, context: Any) -> bytes:
        """The one message of a call. Raises RequestError; AbortError where there is none."""
        try:
            body = await self._gate.received.run(self._client, context.read)
        except TimeoutError as error:
            message = f"expected the whole request within {REQUEST_S:g} seconds, or one where others wait"
            raise RequestError(Reason.UPLOAD_TIMEOUT, message, retry_after_s=CALLS_RETRY_S) from error
        if body is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "expected one message")
        self.check_unread()  # more may have been handed over while this one came
        return cast(bytes, body)

    def hand_over(self, reply: bytes) -> None:
        """The reply goes to gRPC, where it counts until the client has taken it."""
        self._unread_bytes = len(reply)
        if reply:
            self._gate.unread.take(self._client, self._unread_bytes)

    async def hold(self, seconds: float, code: int) -> None:
        """Keep the answer to a refused call back. It counts for so long even if its client gives it up, or giving up
        would be a way to go on at once. code: of the refusal.

        Who is not let in, or needs not be known, takes no place from others so: the call counts among those turned
        away. Where these have no room its answer is not kept back, but its connection counts there for so long; a
        probe keeps its own place then, as nothing would stop the next one.
        """
        self._held_until_s = asyncio.get_running_loop().time() + seconds
        away, client = self._gate.turned_away, self._client
        is_probe = self._calls is not self._gate.calls
        if code in _NOT_LET_IN or (is_probe and away.has_room(client)):
            self._calls.give_back(client, 1)
            if not away.has_room(client):
                seconds = 0.0
                if away.has_any(client):
                    self._held_until_s = 0.0
            self._calls = away
            away.take(client, 1)
        await asyncio.sleep(seconds)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """gRPC is done with the call."""
        loop = asyncio.get_running_loop()
        if self._held_until_s > loop.time():
            loop.call_at(self._held_until_s, self._calls.give_back, self._client, 1)
        else:
            self._calls.give_back(self._client, 1)
        if self._unread_bytes:
            self._gate.unread.give_back(self._client, self._unread_bytes)
