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

# An adapter that arrives is reported at once. After so many ticks those that rows wait for are asked for again: one may
# have been promised to others, or gone wrong. With hundreds of them that takes milliseconds.
ASK_TICKS = 5


class AdapterWait:
    """The adapters of one scheduler's batches, and the rows of all spans that wait for theirs. For one event loop."""

    def __init__(
        self,
        adapters: SequenceAdapters,
        ready: Sequence[ReadyQueue],
        guarded: Callable[[Callable[[], None]], None],
        pump: Callable[[], None],
        watch: Callable[[], None],
    ) -> None:
        """guarded, pump: as Tick's. watch: called when a row begins to wait; `ticked` is to be called from then on."""
        self._adapters, self._ready, self._guarded, self._pump = adapters, ready, guarded, pump
        self._watch = watch
        self._arrived: list[int] = []
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

    def ticked(self) -> bool:
        """Look after the rows that wait; whether there are any."""
        if self.num_waiting:
            self._num_ticks += 1
            if self._num_ticks % ASK_TICKS == 0:
                self._ask_again()
                self._pump()
        return self.num_waiting > 0

    def _wake_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for number in arrived:
            self._wake(number)
        self._pump()

    def _wake(self, number: int) -> None:
        for ready in self._ready:
            ready.wake(number)

    def _ask_again(self) -> None:
        """Ask for every adapter that rows still wait for; those that nobody waits for any more are not brought."""
        registry = self._adapters.registry
        assert registry is not None
        for number in sorted({number for ready in self._ready for number in ready.parked}):
            if not sum(ready.still_waits(number) for ready in self._ready):
                registry.places.cancel(number)
            elif registry.places.request(number, registry.content(number)):
                self._wake(number)
