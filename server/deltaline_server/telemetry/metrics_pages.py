"""The pages of metrics: as exact as can be while few ask for them, and made seldom while many do.

Encoding one keeps Python's interpreter busy for milliseconds, and the event loop waits for that.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

# Pages made a second, of all formats; as many at once after a second in which none was made.
PAGES_PER_S = 10
# How old a page is at most that is given again.
FRESH_S = 1.0


@dataclass(frozen=True)
class MetricsPage:
    """A page in one format. made_s: when it was."""

    plain: bytes
    zipped: bytes
    content_type: str
    made_s: float


class MetricsPages:
    """Makes the pages of a registry, one at a time: one for each that asks, but where more ask than are to be made a
    second, who comes next is given the last one of the format. Threads share it."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: monotonic seconds."""
        self._registry, self._clock = registry, clock
        self._lock = threading.Lock()
        # How many could be made at once, at that time.
        self._left, self._left_s = float(PAGES_PER_S), clock()
        self._last: dict[str, MetricsPage] = {}

    def page(self, accept: str) -> MetricsPage:
        """The page in the format that this header `Accept` asks for; the last one of each header is kept. Raises what a
        collector raises."""
        with self._lock:
            now_s, page = self._clock(), self._last.get(accept)
            left = min(PAGES_PER_S, self._left + (now_s - self._left_s) * PAGES_PER_S)
            if page is None or left >= 1 or now_s - page.made_s >= FRESH_S:
                encode, content_type = choose_encoder(accept)
                plain = encode(self._registry)
                zipped = gzip.compress(plain)
                # From when it was made on, or pages that take long would be made all the time.
                self._left, self._left_s = max(0.0, left - 1), self._clock()
                page = self._last[accept] = MetricsPage(plain, zipped, content_type, self._left_s)
            return page
