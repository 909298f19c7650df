"""The drain of a server: it opens no new sequences, and those that are open are stepped, or moved to other servers
meanwhile, until none is or the time is over."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Code, Refusal, RequestError
from deltaline_server.log import event
from deltaline_server.moving.mover import Mover
from deltaline_server.principal import Principal
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.tables.sequences import SequenceTable

# Sequences that go to one server before the next one has its turn.
AT_ONE_TURN = 16
# Until what could not be moved is tried again.
AGAIN_S = 1.0

_log = logging.getLogger(__name__)


class Drain:
    """A drain that has not begun yet. All methods belong to the event loop's thread."""

    def __init__(
        self,
        mover: Mover,
        table: SequenceTable,
        scheduler: Scheduler,
        default_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """clock: monotonic seconds."""
        self._mover, self._table, self._scheduler = mover, table, scheduler
        self._default_timeout_s, self._clock = default_timeout_s, clock
        self._until_s = 0.0
        self._targets = list[str]()
        self._turn = count()
        self._moving: asyncio.Task[None] | None = None

    async def check(self, target: str) -> None:
        """Raise RequestError as Mover.move does unless sequences may be moved to a server, which answers."""
        await self._mover.check(target)

    def begin(self, timeout_s: float | None = None, target: str = "") -> None:
        """Begin the drain, unless it has begun; timeout_s: None for the default. Sequences are moved to every target
        that was ever named, in turn: each has to be one that `check` has accepted; empty for none."""
        table = self._table
        if not table.is_draining:
            table.is_draining = True
            timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
            self._until_s = self._clock() + timeout_s
            event(
                _log, "drain began", timeout_s=timeout_s, sequences_open=table.num_open, second_signal="stops at once"
            )
        if target and target not in self._targets:
            event(_log, "sequences are to be moved", target=target)
            self._targets.append(target)
            if self._moving is None or self._moving.done():
                self._moving = asyncio.create_task(self._move_all(), name="drain")

    def is_over(self) -> bool:
        """Whether a drain has begun and its time is over, or none is open and nothing waits, and whoever has one that
        was moved was told where it lives."""
        table = self._table
        if not table.is_draining:
            return False
        untold = table.moved.count_untold() if self._targets else 0
        is_idle = not (table.num_open or untold or self._scheduler.load().queued_rows)
        if not is_idle and self._clock() < self._until_s:
            return False
        moved = {"moved": self._mover.num_moved, "untold": untold} if self._targets else {}
        event(_log, "drain over", sequences_open=table.num_open, **moved)
        return True

    async def close(self) -> None:
        """Move nothing more; what is on its way stays here. Idempotent."""
        if self._moving is not None:
            self._moving.cancel()
            with suppress(asyncio.CancelledError):
                await self._moving

    async def _move_all(self) -> None:
        try:
            while True:
                if not await self._move_each():
                    break
                await asyncio.sleep(AGAIN_S)
        except Exception:
            _log.exception("sequences are moved no more")

    async def _move_each(self) -> bool:
        """Try once to move each sequence that is open; whether some are left."""
        before, failed = self._mover.num_moved, list[Refusal]()
        for principal, handles in self._table.open_by_principal():
            for at in range(0, len(handles), AT_ONE_TURN):
                failed += await self._move(principal, handles[at : at + AT_ONE_TURN])
        left = sum(len(handles) for _, handles in self._table.open_by_principal())
        moved, names = self._mover.num_moved - before, Counter(one.reason.name for one in failed)
        reasons = ",".join(f"{name}:{names[name]}" for name in sorted(names))
        [(why, _)] = Counter(one.message for one in failed).most_common(1) or [("none", 0)]
        event(_log, "sequences moved", moved=moved, failed=len(failed), reasons=reasons or "none", why=why, left=left)
        return bool(left)

    async def _move(self, principal: Principal, handles: NDArray[np.uint64]) -> list[Refusal]:
        """Move a principal's sequences to the target whose turn it is. Returns why those that failed did."""
        target = self._targets[next(self._turn) % len(self._targets)]
        try:
            moved = await self._mover.move(self._table.server_epoch, handles, principal, target)
        except RequestError as error:
            return [error.refusal] * len(handles)
        return [one for one in moved.refusals.values() if one.reason.code != Code.NOT_FOUND]  # those are over
