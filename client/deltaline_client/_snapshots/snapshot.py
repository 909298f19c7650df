"""A snapshot as the client knows it, and those of a server. Frozen values: what the server said when it was asked."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Generic, TypeVar

from deltaline.v1 import state_service_pb2 as pb
from deltaline_client._prefixes import Tier
from deltaline_client._state import ClientState
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._transport.flow import Flow, Server

ID_BYTES = 16

AnySequence = TypeVar("AnySequence", bound=SequenceRecord)


class SnapshotState(IntEnum):
    """How it stands with a snapshot on the server."""

    HELD = pb.SNAPSHOT_STATE_HELD
    UNKNOWN = pb.SNAPSHOT_STATE_UNKNOWN
    EXPIRED = pb.SNAPSHOT_STATE_EXPIRED
    RELEASED = pb.SNAPSHOT_STATE_RELEASED
    EVICTED = pb.SNAPSHOT_STATE_EVICTED
    LOST = pb.SNAPSHOT_STATE_LOST


class SnapshotRecord(Generic[AnySequence]):
    """A snapshot that the server held when it was told of.

    id: 16 bytes that name it, also for other clients of the same principal. position: committed tokens, on every span.
    adapter: the name under which its adapter was opened, None for none; adapter_hash: that adapter's content_hash.
    pinned: it stays when memory is short. lease_remaining_s: then. size_bytes: of its state, what it shares with others
    included. tier: where that was. created_s: seconds since 1970 (UTC), by the server's clock.
    """

    _make_sequence: type[AnySequence]

    def __init__(self, client: ClientState, message: pb.Snapshot, at: Server | None = None) -> None:
        """at: who holds it, None where that is not known."""
        self._client, self._at = client, at
        self.id = message.snapshot_id
        self.position = message.position
        self.adapter, self.adapter_hash = message.adapter or None, message.adapter_hash
        self.pinned = message.pinned
        self.lease_remaining_s = message.lease_remaining_ms / 1000
        self.size_bytes = message.size_bytes
        self.tier = Tier.from_proto(message.tier)
        self.created_s = message.created_ms / 1000

    def _run(self, flow: Flow[Any]) -> Any:
        return self._client._run(flow)

    def __repr__(self) -> str:
        adapter = "" if self.adapter is None else f", adapter={self.adapter!r}"
        pinned = ", pinned" if self.pinned else ""
        return f"{type(self).__name__}(id={self.id.hex()}, position={self.position}{adapter}{pinned})"


AnySnapshot = TypeVar("AnySnapshot", bound=SnapshotRecord[Any])


class SnapshotsRecord(Generic[AnySnapshot]):
    """The snapshots of a client's principal."""

    _make_snapshot: type[AnySnapshot]

    def __init__(self, client: ClientState) -> None:
        self._client = client

    def _run(self, flow: Flow[Any]) -> Any:
        return self._client._run(flow)


def id_of(snapshot: SnapshotRecord[Any] | bytes) -> bytes:
    """The id of a snapshot, or the id itself. Raises TypeError, ValueError."""
    if isinstance(snapshot, SnapshotRecord):
        return snapshot.id
    if not isinstance(snapshot, bytes):
        raise TypeError(f"snapshot: expected a snapshot or its id, got {type(snapshot).__name__}")
    if len(snapshot) != ID_BYTES:
        raise ValueError(f"snapshot: expected an id of {ID_BYTES} bytes, got {len(snapshot)}")
    return snapshot


def holder_of(snapshot: SnapshotRecord[Any] | bytes | None) -> Server | None:
    """Who holds a snapshot; None where that is not known, or has no name to be found by."""
    at = snapshot._at if isinstance(snapshot, SnapshotRecord) else None
    return None if at is None or not at.name else at
