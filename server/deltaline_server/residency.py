"""Residency: sees to it that rows whose adapter is not on the device run once it is there.

Such rows are apart from those that may run (ready.py), so nobody waits for them. Knows adapters' numbers and who waits;
which adapter gets a slot is adapter_slots.py's to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from deltaline_server.batch_adapters import BatchAdapters
from deltaline_server.bindings import Bindings
from deltaline_server.ready import ReadyRows

# While rows wait for their adapters: how often these are asked for again and the rows' deadlines are looked at,
# seconds. The device may have nothing else to do, and an adapter may have been promised to others. One that arrives is
# told.
ASK_AGAIN_S = 0.02


class Residency:
    """The adapters of one scheduler's batches, and the rows of all spans that wait for theirs. For one event loop."""

    def __init__(
        self,
        bindings: Bindings,
        ready: Sequence[ReadyRows],
        guarded: Callable[[Callable[[], None]], None],
        pump: Callable[[], None],
    ) -> None:
        """guarded: calls something, and handles what it raises. pump: drops overdue rows, and runs those that may."""
        self._bindings, self._ready, self._guarded, self._pump = bindings, ready, guarded, pump
        self._arrived: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Rows that wait for their adapter, with those that were dropped since."""
        return sum(ready.num_parked for ready in self._ready)

    def begin(self) -> BatchAdapters | None:
        """What a batch takes its adapters with; None while no sequence has one."""
        registry = self._bindings.registry
        return BatchAdapters(registry, self._watch) if registry is not None and self._bindings.num_bound else None

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
        """Ask again later, as rows wait."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._guarded, self._ask_again)

    def _ask_again(self) -> None:
        """Ask for every adapter that rows still wait for; those that nobody waits for any more are not brought."""
        self._timer = None
        registry = self._bindings.registry
        assert registry is not None
        self._pump()
        for number in sorted({number for ready in self._ready for number in ready.parked}):
            if not sum(ready.still_waits(number) for ready in self._ready):
                registry.cancel(number)
            elif registry.want(number):
                self._wake(number)
        if self.num_waiting:
            self._watch()
        if any(ready.priority is not None for ready in self._ready):
            self._pump()
