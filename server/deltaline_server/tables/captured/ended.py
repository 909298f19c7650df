"""What became of snapshots that are over, remembered for its owner, within a bound."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from deltaline_server.tables.captured.snapshot import SnapshotState


class Ended:
    """How snapshots ended, by id, at most `limit` of all owners together. When there are more, the owner who has most
    of them loses a quarter of theirs, the oldest: nobody's are forgotten because another has many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: defaultdict[int, OrderedDict[bytes, SnapshotState]] = defaultdict(OrderedDict)
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, id: bytes, owner: int, how: SnapshotState) -> None:
        """A snapshot of an owner has ended, and is not known yet."""
        self._of[owner][id] = how
        self._num += 1
        if self._num > self._limit:
            most = max(self._of, key=lambda each: len(self._of[each]))
            own = self._of[most]
            for _ in range(-(-len(own) // 4)):
                own.popitem(last=False)
                self._num -= 1
            if not own:
                del self._of[most]

    def get(self, id: bytes, owner: int) -> SnapshotState | None:
        """How a snapshot of an owner ended; None where that is not known."""
        return self._of[owner].get(id) if owner in self._of else None
