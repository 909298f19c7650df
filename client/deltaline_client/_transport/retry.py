"""When a call is sent again, and after how long.

Every method of the service may be sent again with the same request: a step is applied once or not at all. So the client
resends by itself; the channel's own retries are off, because a retry must resend the same step and nothing else.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deltaline_client._exceptions import (
    Cancelled,
    DeadlineExceeded,
    DeltalineError,
    Draining,
    Stopping,
    Unavailable,
)
from deltaline_client._seconds import check_seconds

# So many moves of a sequence are followed one after the other. A move takes longer than a call: more are a circle.
MOST_MOVES = 8


@dataclass(frozen=True)
class Retry:
    """How often and how fast a call is sent again.

    Retry()                        the default: until the call's timeout is over
    Retry(max_attempts=1)          never
    Retry(attempt_timeout_s=2.0)   give each attempt two seconds before it is sent again
    Retry(generator=random.Random(0), clock=fake)   for tests

    A wait is initial_backoff_s * multiplier ** k, at most max_backoff_s, less a random part of up to `jitter` of it,
    and never shorter than what the server asked for. Times are in seconds.
    """

    max_attempts: int | None = None
    attempt_timeout_s: float = 30.0
    initial_backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    multiplier: float = 2.0
    jitter: float = 0.5
    generator: random.Random = field(default_factory=random.Random, compare=False)
    clock: Callable[[], float] = field(default=time.monotonic, compare=False)

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts: expected 1 or more, or None, got {self.max_attempts}")
        check_seconds("attempt_timeout_s", self.attempt_timeout_s)
        check_seconds("initial_backoff_s", self.initial_backoff_s, may_be_zero=True)
        check_seconds("max_backoff_s", self.max_backoff_s, may_be_zero=True)
        if not 1 <= self.multiplier <= sys.float_info.max:
            raise ValueError(f"multiplier: expected 1 or more, finite, got {self.multiplier}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter: expected 0 .. 1, got {self.jitter}")


def is_retryable(error: DeltalineError) -> bool:
    """Whether the same request may succeed later.

    True for lost answers, for a server that stops (another may take its place), and wherever the server sent RetryInfo;
    never for a drain, with which earlier servers sent one: it is not taken back.
    """
    if isinstance(error, Draining):
        return False
    return isinstance(error, Unavailable | DeadlineExceeded | Cancelled | Stopping) or error.retry_after_s is not None


class Attempts:
    """The attempts at one call: its deadline, how many were made, how long to wait before the next."""

    def __init__(self, retry: Retry, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s: expected a positive number, got {timeout_s}")
        self._retry = retry
        self._deadline = retry.clock() + timeout_s
        self._made = self._moves = 0

    def next_timeout_s(self) -> float:
        """Count an attempt and return how long it may take, seconds; 0 or less when the deadline is over."""
        self._made += 1
        return self.timeout_s()

    def timeout_s(self) -> float:
        """How long to wait from now for a sign of the attempt under way, seconds; 0 or less as above."""
        return min(self._retry.attempt_timeout_s, self._deadline - self._retry.clock())

    def delay_s(self, *retry_after_s: float | None) -> float | None:
        """Return how long to wait before the next attempt, seconds; None when there is to be none.

        retry_after_s: what the server asked for, once per row or request; None where it said nothing.
        """
        retry = self._retry
        if retry.max_attempts is not None and self._made >= retry.max_attempts:
            return None
        backoff_s = min(retry.max_backoff_s, retry.initial_backoff_s)
        for _ in range(min(self._made - 1, 64)):
            backoff_s = min(retry.max_backoff_s, backoff_s * retry.multiplier)
        backoff_s *= 1 - retry.jitter * retry.generator.random()
        delay_s = max([backoff_s, *(asked_s for asked_s in retry_after_s if asked_s is not None)])
        return delay_s if retry.clock() + delay_s < self._deadline else None

    def moved(self) -> bool:
        """The attempt under way counts for none: a sequence was moved. Return whether to follow it, which ends where it
        was moved too often with nothing done in between."""
        self._made, self._moves = self._made - 1, self._moves + 1
        return self._moves <= MOST_MOVES

    def progressed(self) -> None:
        """Begin the backoff anew, and the count of moves: something got through."""
        self._made = self._moves = 0
