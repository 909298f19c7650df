"""What all connections together make the server hold: replies that wait for their readers, messages for handlers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Of replies that are not read and of messages that wait for handlers, all connections together.
HELD_BYTES = 256 * 2**20


@dataclass(eq=False)
class Share:
    """A connection's part. end: ends the connection, which then gives all of it back."""

    end: Callable[[str], None]
    num_bytes: int = 0


class Held:
    """Counts bytes, at most `max_bytes`: beyond it the connection that has most of them is ended, which loses nothing
    of what its calls did."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._shares: set[Share] = set()

    def join(self, end: Callable[[str], None]) -> Share:
        """A new connection's part."""
        share = Share(end)
        self._shares.add(share)
        return share

    def leave(self, share: Share) -> None:
        """A connection is over, and what it held is dropped. Idempotent."""
        self._shares.discard(share)
        self.num_bytes -= share.num_bytes
        share.num_bytes = 0

    def take(self, share: Share, num_bytes: int) -> None:
        """Count bytes of a connection. May end it, or another."""
        share.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            most = max(self._shares, key=lambda one: one.num_bytes)
            most.end("the server holds too much for this connection: it has to read its replies, and sooner")

    def give_back(self, share: Share, num_bytes: int) -> None:
        """The connection no longer needs these bytes."""
        if share in self._shares:
            share.num_bytes -= num_bytes
            self.num_bytes -= num_bytes
