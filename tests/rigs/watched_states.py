"""States that count what is asked of them, and can be made to wait or to refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deltaline_server import runtime
from deltaline_server.errors import RequestError
from deltaline_server.principal import Principal
from deltaline_server.snapshots.states import States
from deltaline_server.tables.captured.snapshot import SnapshotDescription, SnapshotState
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.open_tokens import Opened


class WatchedSnapshots(SnapshotTable):
    """Attributes: num_renewals, num_releases, calls that began."""

    num_renewals = num_releases = 0

    def renew(self, ids: Sequence[bytes], principal: Principal, lease_s: float | None) -> list[SnapshotState]:
        self.num_renewals += 1
        return super().renew(ids, principal, lease_s)

    def release(self, ids: Sequence[bytes], principal: Principal) -> list[SnapshotState]:
        self.num_releases += 1
        return super().release(ids, principal)


class WatchedStates(States):
    """Attributes: num_forks, num_creates, num_restores, calls that began; has_begun: whether a fork or a create has;
    may_go_on: whether they do; refuses: raised by the next call."""

    snapshots: WatchedSnapshots

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.num_forks = self.num_creates = self.num_restores = 0
        self.refuses: RequestError | None = None
        self.has_begun, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.may_go_on.set()

    async def create(
        self,
        epoch: int,
        handles: NDArray[np.uint64],
        principal: Principal,
        *,
        lease_s: float | None,
        is_pinned: bool,
        keys: Sequence[bytes] = (),
    ) -> list[SnapshotDescription]:
        self.num_creates += 1
        await self._begin()
        return await super().create(epoch, handles, principal, lease_s=lease_s, is_pinned=is_pinned, keys=keys)

    async def fork(
        self, epoch: int, handles: NDArray[np.uint64], count: int, principal: Principal, *, lease_s: float | None
    ) -> Opened:
        self.num_forks += 1
        await self._begin()
        return await super().fork(epoch, handles, count, principal, lease_s=lease_s)

    def restore(self, ids: Sequence[bytes], principal: Principal, *, lease_s: float | None) -> Opened:
        self.num_restores += 1
        self._refuse()
        return super().restore(ids, principal, lease_s=lease_s)

    async def _begin(self) -> None:
        self.has_begun.set()
        await self.may_go_on.wait()
        self._refuse()

    def _refuse(self) -> None:
        error, self.refuses = self.refuses, None
        if error is not None:
            raise error


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are made from now on have such states."""
    monkeypatch.setattr(runtime, "States", WatchedStates)
    monkeypatch.setattr(runtime, "SnapshotTable", WatchedSnapshots)
