"""Which stored snapshot gives way when memory of its tier is short: the one from which the least is expected.

What a snapshot saves is the tokens between the snapshot that would be found in its place, the nearest stored one that
it continues, and itself. How likely it is to be used soon is measured, not assumed, for each kind: tails (nothing
continues them), those that one snapshot continues, branch points that two or more do; each by whether what it continues
was used since, as when a conversation went on otherwise; and by how long ago it was stored or used itself.
So only what was consumed is refreshed, and never the path to it. All methods belong to one thread.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

# A kind is how many snapshots have continued one, 0 .. 3 or more, and whether what it continues was used since. Nothing
# follows from the latter where that is continued by as many as WIDE, such as a system prompt.
_MOST, _KINDS, WIDE = 3, 8, 4
# Ages in events, by powers of two.
_AGES = 40
# What is assumed of each kind until there are measurements: uses per event at age one, halved with each power of two;
# and how many events of one snapshot the assumption counts as.
_ASSUMED = np.array([1.0, 0.1, 0.1, 0.05, 1.0, 0.5, 1.0, 0.5])
_ASSUMED_EVENTS = 64.0
_NOBODY = -1


class Eviction:
    """At most `num_places` snapshots of one tier, and what each is worth keeping for.

    Time is the number of snapshots stored and used, so that an idle hour makes nothing older. Who holds less than an
    equal share of the snapshots loses none.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._now = 0
        self._places: dict[bytes, int] = {}
        self._free = list(range(num_places - 1, -1, -1))
        self._snapshots: list[bytes | None] = [None] * num_places
        self._parent = np.full(num_places, _NOBODY, dtype=np.int32)
        self._position = np.zeros(num_places, dtype=np.int64)
        self._size = np.ones(num_places)
        self._touched = np.zeros(num_places, dtype=np.int64)
        self._continued = np.zeros(num_places, dtype=np.int32)
        self._owner = np.full(num_places, _NOBODY, dtype=np.int64)
        self._is_held, self._is_pinned = np.zeros(num_places, dtype=np.bool_), np.zeros(num_places, dtype=np.bool_)
        self._num_held = Counter[int]()
        # Of each kind and age: uses, and events that snapshots have spent there.
        self._uses, self._events = np.zeros(_KINDS * _AGES), np.zeros(_KINDS * _AGES)
        self._counted = self._halved = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, snapshot: bytes) -> bool:
        return snapshot in self._places

    def stored(
        self, snapshot: bytes, position: int, continues: bytes | None, *, owner: int = 0, size: float = 1.0
    ) -> None:
        """A snapshot was stored.

        continues: the snapshot that its sequence was captured as, or restored from, before; None, or one that is gone,
        for the beginning. size: what it takes of what is short; 1 where that is lines. Raises ValueError when it is
        here already, or no place is free.
        """
        if snapshot in self._places or not self._free:
            raise ValueError("snapshot: expected one that is not here, and a free place")
        self._tick()
        place = self._free.pop()
        parent = _NOBODY if continues is None else self._places.get(continues, _NOBODY)
        self._places[snapshot], self._snapshots[place] = place, snapshot
        self._parent[place], self._position[place], self._size[place] = parent, position, size
        self._touched[place], self._continued[place], self._owner[place] = self._now, 0, owner
        self._is_held[place], self._is_pinned[place] = True, False
        self._num_held[owner] += 1
        if parent != _NOBODY:
            self._continued[parent] += 1

    def consumed(self, snapshot: bytes) -> None:
        """A sequence began with a snapshot. One that is not here is passed over."""
        place = self._places.get(snapshot)
        if place is None:
            return
        self._tick()
        self._uses[self._cells(np.array([place]))] += 1
        self._touched[place] = self._now

    def pin(self, snapshot: bytes, is_pinned: bool) -> None:
        """Whether a snapshot, which is here, must stay."""
        self._is_pinned[self._places[snapshot]] = is_pinned

    def gone(self, snapshot: bytes) -> None:
        """A snapshot is no more, for whatever reason. What continued it continues what it continued. Idempotent."""
        place = self._places.pop(snapshot, None)
        if place is None:
            return
        self._parent[self._parent == place] = self._parent[place]
        owner = int(self._owner[place])
        self._num_held[owner] -= 1
        if not self._num_held[owner]:
            del self._num_held[owner]
        self._snapshots[place] = None
        self._parent[place] = self._owner[place] = _NOBODY
        self._is_held[place] = False
        self._free.append(place)

    def place_of(self, snapshot: bytes) -> int:
        """The place of a snapshot, which is here: 0 .. num_places - 1, the same for as long as it is."""
        return self._places[snapshot]

    def snapshot_at(self, place: int) -> bytes:
        """The snapshot at a place. Raises ValueError where there is none."""
        snapshot = self._snapshots[place]
        if snapshot is None:
            raise ValueError(f"place: expected one of a snapshot, got {place}")
        return snapshot

    def costs(self, *, by_size: bool) -> NDArray[np.float64]:
        """What it costs to lose the snapshot at each place, float64 [num_places]: inf where there is none, or it must
        stay. by_size: for each of what it takes.

        It costs more to lose one of an owner who holds less than an equal share than any of the others.
        """
        costs = np.full(self.num_places, np.inf)
        places = np.flatnonzero(self._is_held & ~self._is_pinned)
        costs[places] = worth = self._worth(places) * (1.0 if by_size else self._size[places])
        if len(places):
            # 1 for those that are worth nothing, or so little that the sum would not tell it.
            costs[places[~self._has_share(places)]] += 1.0 + worth.max()
        return costs

    def _has_share(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the owner of each snapshot holds an equal share of them or more, bool [N]."""
        if len(self._num_held) < 2:
            return np.ones(len(places), dtype=np.bool_)
        share = len(self._places) / len(self._num_held)
        return np.isin(self._owner[places], [owner for owner, held in self._num_held.items() if held >= share])

    def _worth(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        """What each snapshot is kept for, float64 [N]: the chance that an event uses it, times the square root of the
        tokens that it saves, for what it takes.

        The root, since a chance is measured over all of a kind, and those far behind what they continue are not used
        more often than others: with the tokens themselves they stay for too long.
        """
        assumed = (_ASSUMED[:, None] * 0.5 ** np.arange(_AGES)).reshape(-1)
        chance = (self._uses + _ASSUMED_EVENTS * assumed) / (self._events + _ASSUMED_EVENTS)
        parent = self._parent[places]
        saved = self._position[places] - np.where(parent == _NOBODY, 0, self._position[parent])
        worth: NDArray[np.float64] = chance[self._cells(places)] * np.sqrt(np.maximum(saved, 0)) / self._size[places]
        return worth

    def _cells(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The kind and age of each snapshot as one number, int64 [N]."""
        touched, parent = self._touched[places], self._parent[places]
        is_passed_by = (parent != _NOBODY) & (self._touched[parent] > touched) & (self._continued[parent] < WIDE)
        kinds = 2 * np.minimum(self._continued[places], _MOST).astype(np.int64) + is_passed_by
        cells: NDArray[np.int64] = kinds * _AGES + np.frexp(self._now - touched)[1]
        return cells

    def _tick(self) -> None:
        """One event more. Now and then those that snapshots have spent are counted, and old measurements halved."""
        self._now += 1
        since = self._now - self._counted
        if since >= max(16, len(self._places) // 32):
            self._counted = self._now
            cells = self._cells(np.flatnonzero(self._is_held))
            self._events += since * np.bincount(cells, minlength=_KINDS * _AGES)
        if self._now - self._halved >= 8 * self.num_places:
            self._halved = self._now
            self._uses /= 2
            self._events /= 2
