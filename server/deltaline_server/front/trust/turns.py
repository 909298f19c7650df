"""Turns: of several principals that call none takes more of the event loop than its share."""

from __future__ import annotations

from collections.abc import Callable

# What a call takes of the loop, about: a decode of 64 rows on the host of an H200.
CALL_S = 0.5e-3
# How long a principal counts that has called: as long as a front end takes to hand on what a flood gave it at a time,
# before which nobody else's next call comes through.
ACTIVE_S = 0.25
# The longest that a call waits which anybody may make: else strangers would have probes wait until their time is over,
# also by calls that they give up.
OPEN_S = 0.5


class Turns:
    """When calls may begin. While n principals call, those of each begin n * CALL_S apart, and nothing is done for one
    that waits; who calls alone waits for nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        # By the number of a principal, of which there are as many as their file has had: when its last call came, the
        # latest last, and when its next may begin.
        self._called_s: dict[int | None, float] = {}
        self._turn_s: dict[int | None, float] = {}

    def wait_s(self, principal: int | None) -> float:
        """Count a call that came; return for how many seconds it waits. principal: its number; None of calls that
        anybody may make, which have turns as if they were one more principal's, and delay no other."""
        now_s, called_s = self._clock(), self._called_s
        called_s.pop(principal, None)
        while called_s and called_s[first := next(iter(called_s))] <= now_s - ACTIVE_S:
            del called_s[first]
        num_others = len(called_s)
        if principal is not None:
            called_s[principal] = now_s
        # Of calls that began to wait beside others none is overtaken.
        turn_s = max(now_s, self._turn_s.get(principal, now_s))
        self._turn_s[principal] = turn_s + (CALL_S * (num_others + 1) if num_others else 0.0)
        if principal is None:
            self._turn_s[None] = min(self._turn_s[None], now_s + OPEN_S)
        return turn_s - now_s
