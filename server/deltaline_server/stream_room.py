"""How much one stream may make the server hold: steps, and bytes of their tensors. Knows neither messages nor gRPC."""

from __future__ import annotations

import asyncio


class StreamRoom:
    """Bounds the steps of a stream from when they are taken until their replies are written.

    A reply has at most as many bytes as its request's tensor, so this bounds both directions: what waits for the
    device, and what a slow reader leaves lying. A step that is larger than all the room is taken alone.
    """

    def __init__(self, max_steps: int, max_bytes: int) -> None:
        self._max_steps, self._max_bytes = max_steps, max_bytes
        self._steps = self._bytes = 0
        self._freed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Wait for room for one more step of so many bytes, and take it. For one task at a time."""
        while self._steps and (self._steps == self._max_steps or self._bytes + num_bytes > self._max_bytes):
            self._freed.clear()
            await self._freed.wait()
        self._steps += 1
        self._bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        """A step that took so many bytes is over."""
        self._steps -= 1
        self._bytes -= num_bytes
        self._freed.set()
