"""Turns of owners at what is done one at a time: nobody waits behind all that another has asked for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Like a lock, but that of those who wait one owner goes after the other. Belongs to one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        # By owner, the one whose turn is next first.
        self._waiting: OrderedDict[int, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, owner: int) -> AsyncIterator[None]:
        """Inside the context nobody else has a turn."""
        if self._is_taken:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # it had come
                    self._pass_on(owner)
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on(owner)

    def _pass_on(self, owner: int) -> None:
        """An owner's turn is over: those of all others who wait come first."""
        if owner in self._waiting:
            self._waiting.move_to_end(owner)
        while self._waiting:
            following, futures = next(iter(self._waiting.items()))
            mine = futures.popleft()
            if not futures:
                del self._waiting[following]
            if not mine.done():  # else it was cancelled
                mine.set_result(None)
                return
        self._is_taken = False
