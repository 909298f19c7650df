"""The snapshots that are held, of all owners and of each, and what became of others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.tables.captured.ended import Ended
from deltaline_server.tables.captured.snapshot import WHY_GONE, Snapshot, SnapshotState


class Held(Mapping[bytes, Snapshot]):
    """Snapshots by id. To anybody but its owner one is as if it never was."""

    def __init__(self, num_ended: int) -> None:
        """num_ended: of those that are over so many are remembered, so that their owner is told how."""
        self._by_id: dict[bytes, Snapshot] = {}
        # Of each owner, in order.
        self._ids: defaultdict[int, list[bytes]] = defaultdict(list)
        self._ended = Ended(num_ended)

    def __getitem__(self, id: bytes) -> Snapshot:
        return self._by_id[id]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, id: bytes, one: Snapshot) -> None:
        """A snapshot is held from now on."""
        self._by_id[id] = one
        insort(self._ids[one.owner.number], id)

    def end(self, id: bytes, how: SnapshotState) -> Snapshot:
        """A snapshot that is held is over; returns it."""
        one = self._by_id.pop(id)
        own = self._ids[one.owner.number]
        del own[bisect_left(own, id)]
        self._ended.add(id, one.owner.number, how)
        return one

    def num_of(self, principal: Principal) -> int:
        """Snapshots that a principal has."""
        return len(self._ids.get(principal.number, ()))

    def page(self, principal: Principal, after: bytes, limit: int | None) -> tuple[list[bytes], bool]:
        """A principal's ids behind one, which need not be held, in order, at most `limit`; whether there are more."""
        own = self._ids.get(principal.number, [])
        first = bisect_right(own, after)
        page = own[first:] if limit is None else own[first : first + limit]
        return page, first + len(page) < len(own)

    def state(self, id: bytes, principal: Principal) -> SnapshotState:
        """What became of a principal's snapshot."""
        one = self._by_id.get(id)
        if one is not None:
            return SnapshotState.HELD if one.owner.number == principal.number else SnapshotState.UNKNOWN
        return self._ended.get(id, principal.number) or SnapshotState.UNKNOWN

    def find(self, id: bytes, principal: Principal) -> Snapshot:
        """A principal's snapshot. Raises RequestError SNAPSHOT_UNKNOWN, which tells its state."""
        state = self.state(id, principal)
        if state is SnapshotState.HELD:
            return self._by_id[id]
        message = WHY_GONE.get(state, "no snapshot has this id")
        raise RequestError(Reason.SNAPSHOT_UNKNOWN, message, metadata={"state": state.name})

    def check_integrity(self) -> None:
        """Raise ValueError unless each owner has the snapshots that are its own, in order."""
        ids: dict[int, list[bytes]] = {}
        for id in sorted(self._by_id):
            ids.setdefault(self._by_id[id].owner.number, []).append(id)
        if {number: own for number, own in self._ids.items() if own} != ids:
            raise ValueError("snapshot table: principals and their snapshots disagree")
