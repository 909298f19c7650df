"""What all connections together make the server hold: replies that wait for their readers, messages for handlers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Of replies that are not read, and of messages from when they came until their handler reads another or ends.
HELD_BYTES = 256 * 2**20


def most_bytes(queue_bytes: int) -> int:
    """What may be held: a message that waits in the queue counts here too."""
    return HELD_BYTES + queue_bytes


@dataclass
class Held:
    """Counts bytes, at most `max_bytes`: beyond it the share that has most of them is ended, which loses nothing of
    what its calls did."""

    max_bytes: int
    num_bytes: int = 0
    # What ends the owner of each share. The owner refers to its share: kept there, it would be a reference cycle.
    shares: dict[Share, Callable[[str], None]] = field(default_factory=dict)

    def join(self, end: Callable[[str], None], of: str = "connection") -> Share:
        """A part for a connection or a call, as `of` says. end: ends it, which has to `leave`, or to give back."""
        share = Share(self, of)
        self.shares[share] = end
        return share


@dataclass(eq=False)
class Share:
    """The part of what is held that one connection makes the server hold, or one call. What left holds nothing."""

    held: Held
    of: str
    num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes. May end what this share is of, or another."""
        held = self.held
        if self not in held.shares:
            return
        self.num_bytes += num_bytes
        held.num_bytes += num_bytes
        if held.num_bytes > held.max_bytes:
            most = max(held.shares, key=lambda one: one.num_bytes)
            held.shares[most](
                f"the server holds too much for this {most.of}: it has to read its replies sooner, or to send less"
            )

    def give_back(self, num_bytes: int) -> None:
        """These bytes are no longer held."""
        if self in self.held.shares:
            self.num_bytes -= num_bytes
            self.held.num_bytes -= num_bytes

    def leave(self) -> None:
        """What it is of is over, and what that held is dropped. Idempotent."""
        self.held.shares.pop(self, None)
        self.held.num_bytes -= self.num_bytes
        self.num_bytes = 0
