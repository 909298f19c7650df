"""What a client has not read of its calls' replies: bounded, and given to gRPC as the client reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deltaline_server.front.link.held import Held
from deltaline_server.front.port.gate import CLIENT_UNREAD_BYTES, too_much_unread

# From so many bytes on that gRPC has of a client's replies, other large ones wait here: what gRPC was given can't be
# dropped. Small ones go at once, since a client may wait for one of them before it reads what is large.
GIVEN_BYTES = 16 * 2**20
SMALL_BYTES = 128 * 2**10
# Of calls with one request, so many requests of a client are read at a time; others stay with it.
REQUESTS = 16


@dataclass(eq=False)
class Unread:
    """A call's part: bytes of its replies that its client has not read, and of them those that gRPC has."""

    held_bytes: int = 0
    given_bytes: int = 0


class Reader:
    """A client's connection. Its large replies go to gRPC in their order, as it reads; those that wait are counted in
    `held`, and lost when it is this client that has most there."""

    def __init__(self, held: Held) -> None:
        self._share = held.join(self._cut)
        # What cuts each.
        self._calls: dict[Unread, Callable[[str], None]] = {}
        self._given_bytes = 0
        self.requests = asyncio.Semaphore(REQUESTS)
        # Whose turn is next, with a reply of so many bytes.
        self._waiting: deque[tuple[asyncio.Future[None], Unread, int]] = deque()

    def check(self) -> None:
        """Raises RequestError REPLIES_UNREAD where the client has too much to read."""
        if self._share.num_bytes >= CLIENT_UNREAD_BYTES:
            raise too_much_unread()

    def join(self, cut: Callable[[str], None]) -> Unread:
        """A call begins. cut: ends it, when it has lost all replies that gRPC does not have."""
        unread = Unread()
        self._calls[unread] = cut
        return unread

    def leave(self, unread: Unread) -> bool:
        """gRPC is done with a call; whether it was the last."""
        del self._calls[unread]
        self._let_go(unread, unread.held_bytes - unread.given_bytes)
        self.was_read(unread, unread.given_bytes)
        if not self._calls:
            self._share.leave()
        return not self._calls

    def came(self, unread: Unread, num_bytes: int) -> None:
        """A reply came. May cut this call, or others."""
        unread.held_bytes += num_bytes
        self._share.take(num_bytes)

    async def turn(self, unread: Unread, num_bytes: int) -> None:
        """Return when gRPC may be given a reply of so many bytes, or the call is cut."""
        if num_bytes <= SMALL_BYTES or (self._given_bytes < GIVEN_BYTES and not self._waiting):
            self._give(unread, num_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, unread, num_bytes))
        await turn

    def was_read(self, unread: Unread, num_bytes: int) -> None:
        """gRPC has sent so many bytes that it was given."""
        self._let_go(unread, num_bytes)
        unread.given_bytes -= num_bytes
        self._given_bytes -= num_bytes
        while self._waiting and self._given_bytes < GIVEN_BYTES:
            turn, waiting, waiting_bytes = self._waiting.popleft()
            if not turn.done():  # the client may have cancelled
                self._give(waiting, waiting_bytes)
                turn.set_result(None)

    def _give(self, unread: Unread, num_bytes: int) -> None:
        unread.given_bytes += num_bytes
        self._given_bytes += num_bytes

    def _let_go(self, unread: Unread, num_bytes: int) -> None:
        unread.held_bytes -= num_bytes
        self._share.give_back(num_bytes)

    def _cut(self, why: str) -> None:
        for unread, cut in [one for one in self._calls.items() if one[0].held_bytes > one[0].given_bytes]:
            self._let_go(unread, unread.held_bytes - unread.given_bytes)
            cut(why)
        for turn, _, _ in self._waiting:
            if not turn.done():
                turn.set_result(None)
        self._waiting.clear()
