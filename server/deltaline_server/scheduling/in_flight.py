"""Batches in flight: in the engine, and their results back on the event loop, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deltaline_server.batch import BatchResult, StepBatch
from deltaline_server.scheduling.adapters.batch_adapters import NO_PLACE, BatchAdapters
from deltaline_server.scheduling.observer import BatchTiming
from deltaline_server.scheduling.scheduled_rows import ScheduledRows
from deltaline_server.step import RowKind

# After a batch that was polled the loop stays awake for so long, if nothing is in flight: who waits for a reply to send
# the next step does so within that time, and a loop that slept is late by its waking and finds its caches cold.
LINGER_S = 2e-3

_NO_ROWS = dict.fromkeys(RowKind, 0)


class BatchEngine(Protocol):
    """What is needed of an engine."""

    def submit(self, batch: StepBatch, on_done: Callable[[BatchResult], None], polls: bool = False) -> None:
        """Compute a batch; `on_done` is called on a thread of the engine's, or, if the caller polls, by `poll`."""

    def poll(self) -> bool:
        """Call `on_done` for batches that are done; return whether there are more that only this will tell."""


@dataclass(eq=False, slots=True)
class BatchInFlight:
    """A batch that the engine has: its rows in order, times on the scheduler's clock, and its result once it is there.

    num_awaited: short rows that run, whose callers will send their next steps. began_s: when the device came to it, as
    far as is known. predicted_s: how long it was expected to compute. adapters: those that it has taken, None where no
    sequence has any. done_s: when the result was there.
    """

    scheduled: list[ScheduledRows]
    batch: StepBatch
    submitted_s: float
    began_s: float
    adapters: BatchAdapters | None = None
    num_awaited: int = 0
    num_tokens: int = 0
    num_long_tokens: int = 0
    predicted_s: float = 0.0
    busy_s: float = 0.0
    """What the device's busy time grew by."""
    result: BatchResult | None = None
    done_s: float = 0.0

    def take_outputs(self, result: BatchResult) -> None:
        """Give each pending step its outputs and, once however many rows of it are here, the stages' times."""
        taken, num_rows = 0, len(result.finite)
        for pending in dict.fromkeys([rows.pending for rows in self.scheduled]):
            timing = pending.timing
            if not timing.batch_rows:
                timing.queue_s = self.began_s - pending.arrival_s
            timing.copy_in_s += result.copy_in_s
            timing.compute_s += result.compute_s
            timing.copy_out_s += result.copy_out_s
            timing.batch_rows, timing.batch_tokens = num_rows, self.num_tokens
        if result.failed:
            return
        hidden, is_alone = result.hidden, len(self.scheduled) == 1
        for number, rows in enumerate(self.scheduled):
            places = rows.output_places()
            if result.is_placed:
                rows.pending.put_outputs(places, self.batch.into[number])
            else:
                count = places.stop - places.start if isinstance(places, slice) else len(places)
                rows.pending.put_outputs(places, hidden if is_alone else hidden[taken : taken + count])
                taken += count

    def answer(self, result: BatchResult) -> int:
        """Tell the results of the steps that wait for this batch alone; return in how many turns of the event loop the
        replies are gone, 0 where there is none."""
        all_finite, row, turns = bool(result.finite.all()), 0, 0
        for rows in self.scheduled:
            pending, end = rows.pending, row + len(rows.taken)
            is_last = rows.is_last and 0 < len(rows.index) == pending.num_unfinished
            is_sound = all_finite or result.finite[row:end][rows.running].all()
            if is_last and is_sound and not (pending.joins or pending.has_failures or pending.left):
                pending.finish()
                turns = max(turns, pending.reply_turns)
            row = end
        return turns

    def timing(self, result: BatchResult) -> BatchTiming:
        """What the observer counts."""
        num_of_kind = _NO_ROWS.copy()
        queued: list[tuple[RowKind, int, float]] = []
        for rows in self.scheduled:
            waited_s = self.began_s - rows.pending.arrival_s
            for kind, count in rows.num_of_kind.items():
                if count:
                    num_of_kind[kind] += count
                    if not rows.cursor:
                        queued.append((kind, count, waited_s))
        batch, stages_s = self.batch, (result.copy_in_s, result.compute_s, result.copy_out_s)
        timing = BatchTiming(num_of_kind, self.num_tokens, queued, *stages_s, self.busy_s)
        timing.began_s, timing.scheduled = self.began_s, self.scheduled
        if batch.adapter_places is not None:
            places = batch.adapter_places[batch.adapter_places != NO_PLACE]
            timing.num_adapter_rows, timing.num_adapters = len(places), len(np.unique(places))
        return timing


class InFlight:
    """Batches in the engine, first submitted first. For one event loop."""

    def __init__(
        self, engine: BatchEngine, on_done: Callable[[BatchInFlight, BatchResult], None], clock: Callable[[], float]
    ) -> None:
        """on_done: called on the loop with each batch and its result; it may not raise."""
        self._engine, self._on_done, self._clock = engine, on_done, clock
        self.batches: deque[BatchInFlight] = deque()
        self.is_polled = False
        """Whether the loop looks for results in each of its turns, so that its timers are exact."""
        self._is_awake = self._is_polling = self._has_polled = False
        self._awake_until_s = float("-inf")
        self._last_s = float("-inf")

    def start(self, batch: BatchInFlight) -> None:
        """Give a batch to the engine."""
        loop = asyncio.get_running_loop()

        def done(result: BatchResult) -> None:
            batch.done_s = self._clock()
            batch.result = result  # last: the loop may look at any time
            if self._is_polling:
                self._has_polled = True
            else:  # a thread of the engine calls
                loop.call_soon_threadsafe(self._land)

        self.batches.append(batch)
        self._engine.submit(batch.batch, done, polls=True)
        self.is_polled = True
        if not self._is_awake:
            self._is_awake = True
            loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Take results that are there, and look again in the loop's next turn if there is a reason."""
        self._has_polled, self._is_polling = False, True
        try:
            self.is_polled = self._engine.poll()
            self._is_polling = False
            self._land()  # whoever hears of a batch may start the next one, and asks for no second round of polls
        finally:
            self._is_polling = False
            now_s = self._clock()
            if self._has_polled:
                self._awake_until_s = now_s + LINGER_S
            self._is_awake = self.is_polled or (not self.batches and now_s < self._awake_until_s)
            if self._is_awake:
                asyncio.get_running_loop().call_soon(self._poll)

    def _land(self) -> None:
        """Tell results in the order of the batches: one that comes by a thread may overtake one that is polled."""
        while self.batches and (result := self.batches[0].result) is not None:
            batch = self.batches.popleft()
            # A batch was done no sooner than the one before it, whenever each was seen.
            batch.done_s = self._last_s = max(self._last_s, batch.done_s)
            self._on_done(batch, result)
