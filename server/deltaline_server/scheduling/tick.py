"""A tick while rows wait for what no batch brings: their adapter, or what a place among the steps is kept for.

Deadlines are looked at when a batch ends or may begin, and a device that has nothing else to do begins none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

# How often, seconds.
TICK_S = 0.02


class Tick:
    """Ticks from `begin` on, for as long as something needs it. For one event loop."""

    def __init__(self, guarded: Callable[[Callable[[], None]], None], pump: Callable[[], None]) -> None:
        """guarded: calls something, and handles what it raises. pump: drops overdue rows, and runs those that may."""
        self._guarded, self._pump = guarded, pump
        self._timer: asyncio.TimerHandle | None = None
        self.on_tick: Sequence[Callable[[], bool]] = ()
        """Called in each tick behind the pump: whether another one is needed."""

    def begin(self) -> None:
        """Rows wait, or may from now on. Idempotent."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._guarded, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._pump()
        needed = [is_needed() for is_needed in self.on_tick]
        if any(needed):
            self.begin()
