"""A snapshot as its owner sees it. Knows neither lines nor tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

ID_BYTES = 16


class SnapshotState(IntEnum):
    """How it stands with a snapshot; the values of deltaline.v1.SnapshotState."""

    HELD = 1
    UNKNOWN = 2
    EXPIRED = 3
    RELEASED = 4
    EVICTED = 5
    LOST = 6


class Tier(IntEnum):
    """Where a snapshot lies; the values of deltaline.v1.Tier."""

    DEVICE = 1
    HOST = 2
    FILE = 3


@dataclass(frozen=True)
class SnapshotDescription:
    """One snapshot; the fields of deltaline.v1.Snapshot.

    id: ID_BYTES random bytes. adapter: the name that it was opened under, "" for none. lease_s: until the lease's end.
    num_bytes: of lines and pages, shared ones included. created: seconds since 1970 (UTC).
    """

    id: bytes
    position: int
    adapter: str
    adapter_hash: bytes
    is_pinned: bool
    lease_s: float
    num_bytes: int
    tier: Tier
    created: float
