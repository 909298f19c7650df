"""Places that few have at a time, and who waits for one, client by client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """So many places. Who waits gets one when it is free, one client after another. Belongs to the event loop.

    A place is kept for `most_s` at most, and for `least_s` where others wait.
    """

    def __init__(self, count: int, least_s: float, most_s: float) -> None:
        self._free, self._least_s, self._most_s = count, least_s, most_s
        # When each was taken.
        self._taken: dict[asyncio.Timeout, float] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """Wait for a place, and have it for the block. Raises TimeoutError where that takes too long."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(client)
        try:
            async with asyncio.timeout(self._least_s if self._waiting else self._most_s) as taken:
                self._taken[taken] = asyncio.get_running_loop().time()
                yield
        finally:
            del self._taken[taken]
            self._hand_on()

    async def _turn(self, client: str) -> None:
        """Wait until it is this one's turn."""
        if not self._waiting:
            for taken, since_s in self._taken.items():
                if not taken.expired():
                    taken.reschedule(since_s + self._least_s)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._hand_on()
            raise

    def _hand_on(self) -> None:
        """A place is free: it goes to who waits."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
