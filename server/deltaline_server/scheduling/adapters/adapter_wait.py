"""Rows that wait for their adapter: sees to it that they run once it is on the device.

Such rows are apart from those that may run (ready.py), so nobody waits for them. Which adapter gets a place on the
device is adapter_places.py's to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from deltaline_server.scheduling.adapters.batch_adapters import BatchAdapters
from deltaline_server.scheduling.ready import ReadyQueue
from deltaline_server.tables.sequence_adapters import SequenceAdapters

# While rows wait for their adapters the device may have nothing else to do: how often their deadlines are looked at,
# seconds. An adapter that arrives is reported at once.
TICK_S = 0.02
# So many ticks later their adapters are asked for again: one may have been promised to others, or gone wrong. With
# hundreds of them that takes milliseconds.
ASK_TICKS = 5


class AdapterWait:
    """The adapters of one scheduler's batches, and the rows of all spans that wait for theirs. For one event loop."""

    def __init__(
        self,
        adapters: SequenceAdapters,
        ready: Sequence[ReadyQueue],
        guarded: Callable[[Callable[[], None]], None],
        pump: Callable[[], None],
    ) -> None:
        """guarded: calls something, and handles what it raises. pump: drops overdue rows, and runs those that may."""
        self._adapters, self._ready, self._guarded, self._pump = adapters, ready, guarded, pump
        self._arrived: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._num_ticks = 0

    @property
    def num_waiting(self) -> int:
        """Rows that wait for their adapter, with those that were dropped since."""
        return sum(ready.num_parked for ready in self._ready)

    def begin(self) -> BatchAdapters | None:
        """What a batch takes its adapters with; None while no sequence has one."""
        registry = self._adapters.registry
        return BatchAdapters(registry, self._watch) if registry is not None and self._adapters.num_bound else None

    def copied(self, number: int) -> None:
        """An adapter is on the device: the rows that wait for it may run."""
        if not self._arrived:  # those that arrive together have one batch
            asyncio.get_running_loop().call_soon(self._guarded, self._wake_arrived)
        self._arrived.append(number)

    def _wake_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for number in arrived:
            self._wake(number)
        self._pump()

    def _wake(self, number: int) -> None:
        for ready in self._ready:
            ready.wake(number)

    def _watch(self) -> None:
        """Look after the rows that wait."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._guarded, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._num_ticks += 1
        self._pump()
        if self._num_ticks % ASK_TICKS == 0:
            self._ask_again()
            self._pump()
        if self.num_waiting:
            self._watch()

    def _ask_again(self) -> None:
        """Ask for every adapter that rows still wait for; those that nobody waits for any more are not brought."""
        registry = self._adapters.registry
        assert registry is not None
        for number in sorted({number for ready in self._ready for number in ready.parked}):
            if not sum(ready.still_waits(number) for ready in self._ready):
                registry.places.cancel(number)
            elif registry.places.request(number, registry.content(number)):
                self._wake(number)
