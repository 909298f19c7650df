"""How fast calls of a principal begin that has more of them at a time than another."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from deltaline_server.principal import Principal

# So many a second begin whatever others have.
LEAST_PER_S = 100.0
# Who had no call for so long is not there; what others have is counted over as long.
ACTIVE_S = 0.1
# Calls that wait are looked at so often, and the pace is kept over so long.
TICK_S = 1e-3
CATCH_UP_S = 0.01


@dataclass(slots=True)
class _Calls:
    """Of a principal: calls that have begun, and those that wait; the most of both at a time lately, and when; how many
    began since when, and a second before; when the last one came; when the next may begin, at its pace."""

    handled: int = 0
    waiting: OrderedDict[asyncio.Future[None], None] = field(default_factory=OrderedDict)
    most: int = 0
    most_s: float = -math.inf
    num_begun: int = 0
    since_s: float = 0.0
    per_s: float = 0.0
    came_s: float = 0.0
    due_s: float = 0.0

    @property
    def wanted(self) -> int:
        """Calls that are there."""
        return self.handled + len(self.waiting)

    def came(self, now_s: float) -> None:
        """One more is to come."""
        self.came_s = now_s
        if self.wanted >= self.most or now_s - self.most_s > ACTIVE_S:
            self.most, self.most_s = self.wanted + 1, now_s

    def begin(self, now_s: float) -> None:
        """One begins."""
        self.handled += 1
        self.num_begun += 1
        if now_s - self.since_s >= ACTIVE_S:
            self.per_s = self.num_begun / (now_s - self.since_s)
            self.num_begun, self.since_s = 0, now_s


class FairCalls:
    """Lets a principal that has more calls at a time than another begin no more of them a second than that one does,
    and LEAST_PER_S in any case: what it takes of loops, front ends and processors is then what a peer takes. Its other
    calls wait, in their order. Who is alone, or has no more at a time than others, waits for nothing.

    num_held, held_s: calls that waited, and for how many seconds together. Belongs to the event loop.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        # By number: those who have calls, or had some a moment ago.
        self._of: dict[int, _Calls] = {}
        self._tick: asyncio.TimerHandle | None = None
        self.num_held, self.held_s = 0, 0.0

    async def enter(self, principal: Principal | None) -> None:
        """Return when a call of a principal may begin; it has to `leave`, unless this is cancelled. None for calls that
        are nobody's, which may at once."""
        if principal is None or principal.is_alone or not principal.number:
            return
        now_s, calls = self._clock(), self._of.get(principal.number)
        if calls is None:
            calls = self._of[principal.number] = _Calls(since_s=now_s)
        calls.came(now_s)
        if not calls.waiting and self._may_begin(calls, calls.wanted + 1, now_s):
            calls.begin(now_s)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        calls.waiting[turn] = None
        self.num_held += 1
        self._look_again()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                calls.waiting.pop(turn, None)
            else:  # its turn came meanwhile
                self.leave(principal)
            raise
        finally:
            self.held_s += self._clock() - now_s

    def leave(self, principal: Principal | None) -> None:
        """A call that has begun is over."""
        if principal is not None and principal.number and not principal.is_alone:
            self._of[principal.number].handled -= 1

    def look(self) -> None:
        """Let those begin that may."""
        now_s = self._clock()
        for calls in list(self._of.values()):
            while calls.waiting and self._may_begin(calls, calls.wanted, now_s):
                turn, _ = calls.waiting.popitem(last=False)
                if not turn.done():  # given up, and not told yet
                    calls.begin(now_s)
                    turn.set_result(None)

    def _look_again(self) -> None:
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._ticked)

    def _ticked(self) -> None:
        self._tick = None
        self.look()
        if any(calls.waiting for calls in self._of.values()):
            self._look_again()

    def _may_begin(self, calls: _Calls, wanted: int, now_s: float) -> bool:
        """Whether one of so many calls of a principal may begin now; takes the time that it has at its pace."""
        per_s = self._pace(calls, wanted, now_s)
        if per_s == math.inf:
            return True
        due_s = max(calls.due_s, now_s - CATCH_UP_S)
        if due_s > now_s:
            return False
        calls.due_s = due_s + 1 / per_s
        return True

    def _pace(self, calls: _Calls, wanted: int, now_s: float) -> float:
        """How many calls a second a principal with so many may begin; forgets who is not there any more."""
        per_s = math.inf
        for number, other in list(self._of.items()):
            if other is calls:
                continue
            if not other.wanted and now_s - other.came_s > ACTIVE_S:
                del self._of[number]
            elif other.most < wanted:
                per_s = min(per_s, other.per_s)
        return max(per_s, LEAST_PER_S)
