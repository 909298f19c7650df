"""What a snapshot is, to its owner and to the table, and how it can stand with one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from deltaline_server.principal import Principal
from deltaline_server.tables.captured.state import CapturedState, StoredState
from deltaline_server.tables.prefixes.cost import Tier


class SnapshotState(IntEnum):
    """What became of a snapshot."""

    HELD = 1
    UNKNOWN = 2
    EXPIRED = 3
    RELEASED = 4
    EVICTED = 5
    LOST = 6


WHY_GONE = {
    SnapshotState.EXPIRED: "the snapshot's lease ran out",
    SnapshotState.RELEASED: "the snapshot was released",
    SnapshotState.EVICTED: "the snapshot gave way to others",
    SnapshotState.LOST: "what was stored of the snapshot can't be read",
}


@dataclass(frozen=True)
class SnapshotDescription:
    """One snapshot as its owner sees it. lease_s: what is left of it. num_bytes: of its lines and pages, which it may
    share with others. created: seconds since 1970."""

    id: bytes
    position: int
    adapter: str
    adapter_hash: bytes
    is_pinned: bool
    lease_s: float
    num_bytes: int
    tier: Tier
    created: float


@dataclass
class Snapshot:
    """One that is held. deadline_s: when its lease is over, on the table's clock. created: seconds since 1970. key: by
    which it is found, empty for none."""

    state: CapturedState | StoredState
    owner: Principal
    is_pinned: bool
    lease_s: float
    deadline_s: float
    created: float
    key: bytes = b""

    def is_far(self, principal: Principal) -> bool:
        """Whether it is a principal's own, and lies in a lower tier alone."""
        return self.owner.number == principal.number and isinstance(self.state, StoredState)


def describe(id: bytes, one: Snapshot, lease_s: float, num_bytes: int) -> SnapshotDescription:
    """A snapshot as its owner sees it."""
    state, adapter = one.state, one.state.adapter
    return SnapshotDescription(
        id,
        state.position,
        adapter.name,
        adapter.content_hash,
        one.is_pinned,
        lease_s,
        num_bytes,
        state.tier,
        one.created,
    )
