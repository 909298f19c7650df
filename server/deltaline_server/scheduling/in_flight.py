"""Flights: batches that the engine has, and how their results come to the event loop, in order.

Knows the engine and the loop; not what a batch is for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deltaline_server.scheduling.batch import Run
from deltaline_server.step import BatchResult, StepBatch

# After a batch that was polled the loop stays awake for so long, if nothing is in flight: who waits for a reply to send
# the next step does so within that time, and a loop that slept is late by its waking and finds its caches cold.
LINGER_S = 2e-3


class BatchEngine(Protocol):
    """What is needed of an engine."""

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
        """Compute a batch; `on_done` is called on a thread of the engine's, or, if the caller polls, by `poll`."""

    def poll(self) -> bool:
        """Call `on_done` for batches that are done; return whether there are more that only this will tell."""


@dataclass
class _Flight:
    """A batch, its result when it is there, and when that was."""

    run: Run
    result: BatchResult | None = None
    done_s: float = 0.0


class Flights:
    """Batches in the engine, first submitted first. For one event loop."""

    def __init__(
        self, engine: BatchEngine, on_done: Callable[[Run, BatchResult, float], None], clock: Callable[[], float]
    ) -> None:
        """on_done: called on the loop with each batch, its result and when that was there; it may not raise."""
        self._engine, self._on_done, self._clock = engine, on_done, clock
        self._flights: deque[_Flight] = deque()
        self._polls = self._is_awake = self._is_polling = self._has_polled = False
        self._awake_until_s = float("-inf")
        self._last_s = float("-inf")

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_polled(self) -> bool:
        """Whether the loop looks for results in each of its turns, so that its timers are exact."""
        return self._polls

    @property
    def first(self) -> Run:
        """The batch that is done next."""
        return self._flights[0].run

    def start(self, run: Run) -> None:
        """Give a batch to the engine."""
        loop, flight = asyncio.get_running_loop(), _Flight(run)

        def done(result: BatchResult) -> None:
            flight.done_s = self._clock()
            flight.result = result  # last: the loop may look at any time
            if self._is_polling:
                self._has_polled = True
            else:  # a thread of the engine calls
                loop.call_soon_threadsafe(self._land)

        self._flights.append(flight)
        self._engine.submit(run.batch, done, polls=True)
        self._polls = True
        if not self._is_awake:
            self._is_awake = True
            loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Take results that are there, and look again in the loop's next turn: so they are seen at once."""
        self._has_polled, self._is_polling = False, True
        try:
            self._polls = self._engine.poll()
            self._is_polling = False
            self._land()  # whoever hears of a batch may start the next one, and asks for no second round of polls
        finally:
            self._is_polling = False
            self._look_again()

    def _look_again(self) -> None:
        """Poll in the next turn of the loop as well, if there is a reason."""
        now_s = self._clock()
        if self._has_polled:
            self._awake_until_s = now_s + LINGER_S
        self._is_awake = self._polls or (not self._flights and now_s < self._awake_until_s)
        if self._is_awake:
            asyncio.get_running_loop().call_soon(self._poll)

    def _land(self) -> None:
        """Tell results in the order of the batches: one that comes by a thread may overtake one that is polled."""
        while self._flights and (result := self._flights[0].result) is not None:
            flight = self._flights.popleft()
            # A batch was done no sooner than the one before it, whenever each was seen.
            self._last_s = max(self._last_s, flight.done_s)
            self._on_done(flight.run, result, self._last_s)
