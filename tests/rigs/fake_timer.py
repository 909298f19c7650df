"""A timer of the bench without a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from deltaline_bench.timer import Launch


class FakeTimer:
    """Runs what it is given and answers with `first`, then with `times_us` again and again."""

    def __init__(self, *times_us: float, first: Iterable[float] = ()) -> None:
        self._times = itertools.chain(first, itertools.cycle(times_us))
        self._pending: list[float] = []

    def prepare(self, call: Callable[[], Any]) -> Launch:
        return Launch(call, call(), is_captured=False)

    def time(self, run: Callable[[], Any]) -> None:
        run()
        self._pending.append(next(self._times))

    def read(self) -> list[float]:
        values, self._pending = self._pending, []
        return values
