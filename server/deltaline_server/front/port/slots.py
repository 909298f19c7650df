"""Places that few have at a time, and who waits for one, client by client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Slots:
    """So many places. Who waits gets one when it is free, one client after another. Belongs to the event loop.

    A place is kept for `most_s` at most, and for `least_s`, or twice that, where others wait.
    """

    def __init__(self, count: int, least_s: float, most_s: float) -> None:
        self._free, self._least_s, self._most_s = count, least_s, most_s
        # When each was taken, the oldest first, and who has had one for too long.
        self._taken: dict[asyncio.Task[Any], float] = {}
        self._late = set[asyncio.Task[Any]]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        # Not a timer for each, which costs more than most have to do here.
        self._look: asyncio.TimerHandle | None = None

    async def run(self, client: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Wait for a place, work there, and return what that gives. Raises TimeoutError where it takes too long."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(client)
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._taken[task] = loop.time()
        if self._look is None:
            self._look = loop.call_later(self._least_s, self._cut, loop)
        try:
            return await work()
        except asyncio.CancelledError as error:
            if task in self._late and not task.uncancel():
                raise TimeoutError from error
            raise
        finally:
            self._late.discard(task)
            del self._taken[task]
            self._hand_on()

    def _cut(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the places of those that have had them for too long."""
        begin_s = loop.time() - (self._least_s if self._waiting else self._most_s)
        for task, since_s in self._taken.items():
            if since_s > begin_s:
                break
            if task not in self._late:
                self._late.add(task)
                task.cancel()
        self._look = loop.call_later(self._least_s, self._cut, loop) if self._taken else None

    async def _turn(self, client: str) -> None:
        """Wait until it is this one's turn."""
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
