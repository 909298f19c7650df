"""Flow control: how much streams may make the server hold, steps and bytes of their tensors."""

from __future__ import annotations

import asyncio


class SharedBudget:
    """The bytes that all streams of a server may hold together, and who waits for some."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._waiting: set[asyncio.Event] = set()

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more fit."""
        return self._bytes + num_bytes <= self._max_bytes

    def acquire(self, num_bytes: int) -> None:
        """Take bytes, whether they fit or not."""
        self._bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give bytes back, and let all who wait look again."""
        self._bytes -= num_bytes
        for freed in self._waiting:
            freed.set()
        self._waiting.clear()

    def notify(self, freed: asyncio.Event) -> None:
        """Set this event, once, when bytes are given back."""
        self._waiting.add(freed)


class StreamWindow:
    """Bounds the steps of a stream from when they are taken until their replies are written.

    A step's bytes are those of its request's tensor or of its reply's, whichever has more, so this bounds both
    directions: what waits for the device, and what a slow reader leaves lying. A stream that has no step may take one,
    however large it is and whatever others hold: readers that stand still slow the others down, and don't stop them.
    """

    def __init__(self, max_steps: int, max_bytes: int, shared: SharedBudget) -> None:
        self._max_steps, self._max_bytes, self._shared = max_steps, max_bytes, shared
        self._steps = self._bytes = 0
        self._freed = asyncio.Event()

    async def acquire(self, num_bytes: int) -> None:
        """Wait for room for one more step of so many bytes, and take it. For one task at a time."""
        while self._steps and not self._has_room(num_bytes):
            self._freed.clear()
            self._shared.notify(self._freed)
            await self._freed.wait()
        self._steps += 1
        self._bytes += num_bytes
        self._shared.acquire(num_bytes)

    def release(self, num_bytes: int) -> None:
        """A step that took so many bytes is over."""
        self._steps -= 1
        self._bytes -= num_bytes
        self._shared.release(num_bytes)
        self._freed.set()

    def close(self) -> None:
        """The stream is over, and its replies are gone with it. Idempotent."""
        self._shared.release(self._bytes)
        self._steps = self._bytes = 0

    def _has_room(self, num_bytes: int) -> bool:
        is_full = self._steps == self._max_steps or self._bytes + num_bytes > self._max_bytes
        return not is_full and self._shared.has_room(num_bytes)
