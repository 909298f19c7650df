"""Refusals: counted, and who has many of them waits for the answers."""

from __future__ import annotations

import math
from collections.abc import Callable

# Of a principal: so many are answered at once, and so many a second from then on.
BURST = 100
PER_S = 100.0
# How long an answer waits at most.
MAX_HOLD_S = 10.0


class Refusals:
    """When a principal's refused calls may be answered: each in its turn, which are 1 / PER_S apart once the burst is
    spent. A call that waits keeps its place among those of its connection, so who floods ends as slow as the turns are;
    calls that are not refused wait for nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        # By name, of which there are as many as the principals' file had, and one for all that nobody knows.
        self._turns: dict[str, float] = {}

    def hold_s(self, principal: str) -> float:
        """Count a refusal; return for how many seconds its answer is kept back. principal: a name, "" for unknown."""
        now_s = self._clock()
        turn_s = max(self._turns.get(principal, -math.inf), now_s - BURST / PER_S) + 1 / PER_S
        self._turns[principal] = turn_s = min(turn_s, now_s + MAX_HOLD_S)
        return max(0.0, turn_s - now_s)
