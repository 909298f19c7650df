"""Moved sequences: where those live that were let go of here, for as long as somebody may ask for them here."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from deltaline_server.errors import Reason, Refusal

MAX_MOVED = 65_536


@dataclass(frozen=True)
class Owner:
    """Where a sequence lives: the server's name or address, its epoch, and the sequence's handle there."""

    server: str
    server_epoch: int
    handle: int

    def refusal(self) -> Refusal:
        """Why who was told of the sequence's former place gets nothing there."""
        metadata = {"server": self.server, "server_epoch": str(self.server_epoch), "sequence": str(self.handle)}
        return Refusal(Reason.STATE_ELSEWHERE, "the sequence was moved to another server", metadata)


class MovedSequences:
    """Owners by the epoch and handle that named a sequence before, told to the principal whose it is.

    Each is kept for a time; of more than `limit`, those that would be forgotten first are."""

    def __init__(self, clock: Callable[[], float], limit: int = MAX_MOVED) -> None:
        """clock: monotonic seconds."""
        self._clock, self._limit = clock, limit
        self._owners: dict[tuple[int, int], tuple[str, Owner]] = {}
        # When each is forgotten: a heap.
        self._ends: list[tuple[float, tuple[int, int]]] = []
        self._untold: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, epoch: int, handle: int, principal: str, owner: Owner, remaining_s: float) -> None:
        """Tell a principal, by its name, for so long where a sequence lives. Nothing else had its epoch and handle."""
        self._owners[epoch, handle] = principal, owner
        self._untold.add((epoch, handle))
        heapq.heappush(self._ends, (self._clock() + remaining_s, (epoch, handle)))
        self._forget()

    def find(self, epoch: int, handle: int, principal: str) -> Owner | None:
        """Where a principal's sequence lives that was moved, None where nothing is known of that."""
        self._forget()
        whose, owner = self._owners.get((epoch, handle), ("", None))
        return owner if whose == principal else None

    def tell(self, epoch: int, handle: int, principal: str) -> Owner | None:
        """The same, of which the principal is told."""
        owner = self.find(epoch, handle, principal)
        if owner is not None:
            self._untold.discard((epoch, handle))
        return owner

    def count_untold(self) -> int:
        """How many moved sequences there are that nobody was told of and somebody may ask for."""
        self._forget()
        return len(self._untold)

    def _forget(self) -> None:
        while self._ends and (len(self._ends) > self._limit or self._ends[0][0] <= self._clock()):
            _, named = heapq.heappop(self._ends)
            del self._owners[named]
            self._untold.discard(named)
