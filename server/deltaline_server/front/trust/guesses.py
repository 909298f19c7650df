"""Handles that name nothing: counted, and who names many of them is slowed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal

# Of a connection; an honest one that lost all its sequences names each of them a few times.
LEAST_BURST = 1024
BURST_PER_SEQUENCE = 4
PER_S = 100.0
# Connections that are remembered; a new one in their place begins with a burst anyway.
MAX_CONNECTIONS = 4096


class Guesses:
    """A bucket for each principal on each connection that has named such handles, which leaks PER_S of them a second.
    A request may fill it beyond its edge; until it has leaked so far, no other that names handles is looked at.

    Attributes: num_unknown, how many there were; is_slowing, false while no connection has a bucket.
    """

    def __init__(self, max_sequences: int, clock: Callable[[], float]) -> None:
        """max_sequences: of the server. clock: monotonic seconds."""
        self._burst, self._clock = max(LEAST_BURST, BURST_PER_SEQUENCE * max_sequences), clock
        self.num_unknown, self.is_slowing = 0, False
        # Handles in a bucket at a time, the one that got some last at the end.
        self._buckets: OrderedDict[tuple[str, int], tuple[float, float]] = OrderedDict()

    def check(self, connection: str, principal: Principal) -> None:
        """Raise RequestError TOO_MANY_UNKNOWN while the principal's bucket on the connection is full."""
        who = connection, principal.number
        level = self._level(who)
        self._level(next(iter(self._buckets), who))  # the oldest: of a connection that is gone nobody else asks
        if level >= self._burst:
            message = "this connection has named too many sequences that are none of its principal's"
            raise RequestError(Reason.TOO_MANY_UNKNOWN, message, retry_after_s=(level - self._burst + 1) / PER_S)

    def add(self, connection: str, principal: Principal, count: int) -> None:
        """A request has named so many handles that mean nothing to its principal."""
        if not count:
            return
        self.num_unknown += count
        who = connection, principal.number
        self._buckets[who] = self._level(who) + count, self._clock()
        self._buckets.move_to_end(who)
        if len(self._buckets) > MAX_CONNECTIONS:
            self._buckets.popitem(last=False)
        self.is_slowing = True

    def _level(self, who: tuple[str, int]) -> float:
        """What is in a bucket now; an empty one is forgotten."""
        level, since_s = self._buckets.get(who, (0.0, 0.0))
        level -= (self._clock() - since_s) * PER_S
        if level > 0:
            return level
        self._buckets.pop(who, None)
        self.is_slowing = bool(self._buckets)
        return 0.0
