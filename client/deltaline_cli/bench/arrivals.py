"""When the steps of an open loop are due: a Poisson process, and a thread that wakes on time for it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator

import numpy as np


def arrivals(rate: float, ramp_up_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield the times, in seconds from 0, of a Poisson process whose rate grows evenly to `rate` in the ramp-up."""
    expected = 0.0
    in_ramp_up = rate * ramp_up_s / 2
    while True:
        expected += rng.exponential()
        if expected < in_ramp_up:
            yield math.sqrt(2 * expected * ramp_up_s / rate)
        else:
            yield ramp_up_s + (expected - in_ramp_up) / rate


class ArrivalThread:
    """Puts (due, late) into `queue` as each time comes, seconds: when, and how late the event loop came to it.

    A thread, as the loop's own timers are rounded to milliseconds. Puts None when the times are over, or after `stop`.
    """

    def __init__(self, times: Iterator[float], begin_s: float, end_s: float) -> None:
        self.queue: asyncio.Queue[tuple[float, float] | None] = asyncio.Queue()
        self._times, self._begin_s, self._end_s = times, begin_s, end_s
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)

    def start(self) -> None:
        """Begin to wait for the first time."""
        self._thread.start()

    def stop(self) -> None:
        """Pass on no further time. Idempotent."""
        self._stopped.set()

    def _run(self) -> None:
        for time_s in self._times:
            due_s = self._begin_s + time_s
            if due_s > self._end_s or self._stopped.wait(max(0.0, due_s - time.monotonic())):
                break
            self._call(due_s)
        self._call(None)

    def _call(self, due_s: float | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, due_s)

    def _put(self, due_s: float | None) -> None:
        self.queue.put_nowait(None if due_s is None else (due_s, time.monotonic() - due_s))
