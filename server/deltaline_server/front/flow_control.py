"""Flow control: how much streams may make the server hold, steps and bytes of their tensors."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict

from deltaline_server.principal import Principal, leaves_share


class SharedBudget:
    """The bytes that all streams of a server may hold together, those of each principal their share, and which windows
    wait for some."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes
        # By the number of a principal; of those that wait, who has waited longest first.
        self._bytes: Counter[int] = Counter()
        self._waiting: dict[int, OrderedDict[StreamWindow, None]] = {}

    def has_room(self, principal: Principal, num_bytes: int) -> bool:
        """Whether so many bytes more fit, and leave others what is theirs; who takes none always has room."""
        if num_bytes > self._free_bytes or not num_bytes:
            return not num_bytes
        if not principal.number or principal.is_alone:
            return True
        return leaves_share(self._bytes[principal.number], num_bytes, self._free_bytes)

    def acquire(self, principal: Principal, num_bytes: int) -> None:
        """Take bytes, whether they fit or not."""
        self._free_bytes -= num_bytes
        self._bytes[principal.number] += num_bytes

    def release(self, principal: Principal, num_bytes: int) -> None:
        """Give bytes back; windows that wait take their steps, each principal's in order, while there is room."""
        self._free_bytes += num_bytes
        self._bytes[principal.number] -= num_bytes
        for waiting in [*self._waiting.values()]:
            while waiting and next(iter(waiting)).take_asked():
                pass

    def hand_over(self, before: Principal, after: Principal, num_bytes: int) -> None:
        """Count bytes as another principal's."""
        self._bytes[before.number] -= num_bytes
        self._bytes[after.number] += num_bytes

    def wait(self, principal: Principal, window: StreamWindow) -> None:
        """Let a principal's window wait, behind those that do."""
        self._waiting.setdefault(principal.number, OrderedDict())[window] = None

    def leave(self, principal: Principal, window: StreamWindow) -> None:
        """A window waits no more. Idempotent."""
        waiting = self._waiting.get(principal.number)
        if waiting is not None:
            waiting.pop(window, None)
            if not waiting:
                del self._waiting[principal.number]


class StreamWindow:
    """Bounds the steps of a stream from when they are taken until their replies are written.

    A step's bytes are those of its request's tensor or of its reply's, whichever has more, so this bounds both
    directions: what waits for the device, and what a slow reader leaves lying. A stream that has no step may take one,
    however large it is and whatever others hold: readers that stand still slow the others down, and don't stop them.
    """

    def __init__(self, max_steps: int, max_bytes: int, shared: SharedBudget, principal: Principal) -> None:
        """principal: who the stream is from."""
        self._max_steps, self._max_bytes, self._shared, self._principal = max_steps, max_bytes, shared, principal
        self._steps = self._bytes = 0
        self._asked: int | None = None
        self._taken = asyncio.Event()

    def belong_to(self, principal: Principal) -> None:
        """The stream is from another, or from one who may have another share. Not while it waits."""
        self._shared.hand_over(self._principal, principal, self._bytes)
        self._principal = principal

    async def acquire(self, num_bytes: int) -> None:
        """Wait for room for one more step of so many bytes, and take it. For one task at a time."""
        if not self._steps or self._has_room(num_bytes):
            self._steps += 1
            self._bytes += num_bytes
            self._shared.acquire(self._principal, num_bytes)
            return
        self._asked = num_bytes
        self._taken.clear()
        try:
            await self._taken.wait()
        finally:
            self._ask_no_more()

    def take_asked(self) -> bool:
        """Take the step that is asked for, if there is one and room for it."""
        num_bytes = self._asked
        if num_bytes is None or (self._steps and not self._has_room(num_bytes)):
            return False
        self._steps += 1
        self._bytes += num_bytes
        self._shared.acquire(self._principal, num_bytes)
        self._ask_no_more()
        self._taken.set()
        return True

    def release(self, num_bytes: int) -> None:
        """A step that took so many bytes is over."""
        self._steps -= 1
        self._bytes -= num_bytes
        self._shared.release(self._principal, num_bytes)
        if self._asked is not None:
            self.take_asked()

    def close(self) -> None:
        """The stream is over, and its replies are gone with it. Idempotent."""
        self._shared.release(self._principal, self._bytes)
        self._steps = self._bytes = 0

    def _has_room(self, num_bytes: int) -> bool:
        """Whether one more fits behind others; where only what all share has no room, the window waits for that."""
        if self._steps == self._max_steps or self._bytes + num_bytes > self._max_bytes:
            return False
        if self._shared.has_room(self._principal, num_bytes):
            return True
        self._shared.wait(self._principal, self)
        return False

    def _ask_no_more(self) -> None:
        self._asked = None
        self._shared.leave(self._principal, self)
