"""The tiers beside the device, as the table of snapshots knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from deltaline_server.tables.captured.state import StoredState
from deltaline_server.tables.prefixes.cost import Tier, Way


class LowerTiers(Protocol):
    """Where snapshots lie that gave way on the device."""

    @property
    def ways(self) -> Mapping[Tier, Way]:
        """How long it takes to bring one back, for each tier in use."""

    def added(self, id: bytes) -> None:
        """A snapshot was captured: it may be stored there soon."""

    def find(self, id: bytes) -> StoredState | None:
        """Where a snapshot lies there, in the nearest of the tiers."""

    def forget(self, id: bytes) -> None:
        """A snapshot is over. Idempotent."""


class NoTiers:
    """There are none."""

    ways: Mapping[Tier, Way] = {}

    def added(self, id: bytes) -> None:
        pass

    def find(self, id: bytes) -> StoredState | None:
        return None

    def forget(self, id: bytes) -> None:
        pass
