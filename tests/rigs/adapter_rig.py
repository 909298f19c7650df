"""What the tests of adapters' managers share: contents, a device that only remembers, and a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deltaline_server.tables.adapter_places import Content


@dataclass(frozen=True)
class FakeContent:
    """An adapter without weights."""

    content_hash: bytes
    num_bytes: int = 10
    rank: int = 4
    num_elsewhere: int = 0


class FakeDevice:
    """Slots that remember what was copied to them; copies end when told. `used` are slots that batches read now."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[bytes | None] = [None] * num_slots
        self.used: list[int] = []
        self.running: list[tuple[int, Content, Callable[[bool], None]]] = []

    def copy(self, slot: int, content: Content, done: Callable[[bool], None]) -> None:
        assert slot not in self.used, "a slot is overwritten under a batch"
        assert slot not in [running for running, _, _ in self.running], "two copies to one slot at once"
        self.slots[slot] = b"half of " + content.content_hash
        self.running.append((slot, content, done))

    def clear(self, slot: int) -> None:
        assert slot not in self.used, "a slot is cleared under a batch"
        assert slot not in [running for running, _, _ in self.running], "a slot is cleared under a copy"
        self.slots[slot] = None

    def finish(self, index: int = 0, is_copied: bool = True) -> None:
        """End a copy that runs."""
        slot, content, done = self.running.pop(index)
        if is_copied:
            self.slots[slot] = content.content_hash
        done(is_copied)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_asked = 0

    def __call__(self) -> float:
        self.num_asked += 1
        return self.now_s
