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
        # Whose it is, where it lives, and when that is forgotten.
        self._owners: dict[tuple[int, int], tuple[str, Owner, float]] = {}
        # When each is forgotten, and what was told anew meanwhile: a heap.
        self._ends: list[tuple[float, tuple[int, int]]] = []
        self._untold: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return len(self._owners)

    def add(
        self, epoch: int, handle: int, principal: str, owner: Owner, remaining_s: float, *, is_told: bool = False
    ) -> None:
        """Tell a principal, by its name, for so long where a sequence lives, in place of what was known of it. is_told:
        whether it may have been told before."""
        end_s = self._clock() + remaining_s
        self._owners[epoch, handle] = principal, owner, end_s
        if not is_told:
            self._untold.add((epoch, handle))
        heapq.heappush(self._ends, (end_s, (epoch, handle)))
        self._forget()

    def find(self, epoch: int, handle: int, principal: str) -> Owner | None:
        """Where a principal's sequence lives that was moved, None where nothing is known of that."""
        self._forget()
        whose, owner, _ = self._owners.get((epoch, handle), ("", None, 0.0))
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
            end_s, named = heapq.heappop(self._ends)
            if named in self._owners and self._owners[named][2] == end_s:
                del self._owners[named]
                self._untold.discard(named)
