"""Work that waits its turn: done one after the other, behind whatever asked for it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class Backlog:
    """Ids that a piece of work is yet to be done for. All methods belong to the event loop's thread."""

    def __init__(self, work: Callable[[bytes], Awaitable[None]]) -> None:
        self._work, self._is_closed = work, False
        self._ids = OrderedDict[bytes, None]()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._ids)

    @property
    def is_busy(self) -> bool:
        """Whether anything waits or is under way."""
        return self._task is not None and not self._task.done()

    def add(self, id: bytes) -> None:
        """Let an id wait. After `close` it is passed over."""
        if self._is_closed:
            return
        self._ids[id] = None
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._do_all())

    def forget(self, id: bytes) -> None:
        """An id need not wait any more, if it does; what is under way goes on."""
        self._ids.pop(id, None)

    async def close(self) -> None:
        """Finish what is under way and forget the rest. Idempotent."""
        self._is_closed = True
        self._ids.clear()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _do_all(self) -> None:
        while self._ids:
            try:
                await self._work(self._ids.popitem(last=False)[0])
            except Exception:  # of one; the others may be done
                logger.exception("a snapshot could not be stored")
