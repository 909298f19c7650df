"""States of a server without their tensors: snapshots in a dict, over a real table of sequences.

What is restored has the position and the adapter of its snapshot, and zero state. Captures wait while `is_held`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.runtime import Runtime
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.sequence import GONE, SequenceDescription, SequenceState
from deltaline_server.tables.sequences import SequenceTable
from deltaline_server.tables.snapshots import ID_BYTES, SnapshotDescription, SnapshotState, Tier

SNAPSHOT_BYTES = 4096


@dataclass
class _Held:
    owner: int
    description: SnapshotDescription
    full_lease_s: float
    deadline_s: float


class StandInStates:
    """What StateService calls. Attributes: num_forks, num_creates, num_restores, calls that began; settled: how many
    captures are done; refuses: raised by the next call."""

    def __init__(self, table: SequenceTable, clock: Callable[[], float], num_lines: int = 64) -> None:
        self._table, self._clock, self._num_lines = table, clock, num_lines
        self._held: dict[bytes, _Held] = {}
        self._over: dict[tuple[int, bytes], SnapshotState] = {}
        self.num_forks = self.num_creates = self.num_restores = self.num_renewals = self.num_releases = 0
        self.refuses: RequestError | None = None
        self.has_begun, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.may_go_on.set()

    async def create(
        self, epoch: int, handles: NDArray[np.uint64], principal: Principal, *, lease_s: float | None, is_pinned: bool
    ) -> list[SnapshotDescription]:
        self.num_creates += 1
        told = await self._captured(epoch, handles, principal)
        if len(self._held) + len(told) > self._num_lines:
            message = f"{len(self._held)} of {self._num_lines} snapshot lines are held, {len(told)} more were asked for"
            raise RequestError(Reason.NO_SNAPSHOT_LINES, message, retry_after_s=1.0)
        full_s = self._table.default_lease_s if lease_s is None else lease_s
        made = [
            SnapshotDescription(
                secrets.token_bytes(ID_BYTES),
                one.spans[0].position,
                one.adapter.name,
                one.adapter.content_hash,
                is_pinned,
                full_s,
                SNAPSHOT_BYTES,
                Tier.DEVICE,
                1.7e9 + self._clock(),
            )
            for one in told
        ]
        self._held |= {one.id: _Held(principal.number, one, full_s, self._clock() + full_s) for one in made}
        return made

    def restore(self, ids: Sequence[bytes], principal: Principal, *, lease_s: float | None) -> Opened:
        self.num_restores += 1
        self._refuse()
        held = [self._own(one, principal) for one in ids]
        if None in held:
            raise RequestError(Reason.SNAPSHOT_UNKNOWN, "no snapshot has this id")
        origins = [(one.description.adapter, one.description.position) for one in held if one is not None]
        return self._open(origins, lease_s, principal)

    async def fork(
        self, epoch: int, handles: NDArray[np.uint64], count: int, principal: Principal, *, lease_s: float | None
    ) -> Opened:
        self.num_forks += 1
        told = await self._captured(epoch, handles, principal)
        origins = [(one.adapter.name, one.spans[0].position) for one in told for _ in range(count)]
        return self._open(origins, lease_s, principal)

    def describe(self, principal: Principal) -> list[SnapshotDescription]:
        self._reap()
        now_s = self._clock()
        own = [one for one in self._held.values() if one.owner == principal.number]
        return [replace(one.description, lease_s=one.deadline_s - now_s) for one in own]

    def renew(self, ids: Sequence[bytes], principal: Principal, *, lease_s: float | None) -> list[SnapshotState]:
        self.num_renewals += 1
        for held in (self._own(one, principal) for one in ids):
            if held is not None:
                held.deadline_s = self._clock() + (held.full_lease_s if lease_s is None else lease_s)
        return [self._state(one, principal) for one in ids]

    def release(self, ids: Sequence[bytes], principal: Principal) -> list[SnapshotState]:
        self.num_releases += 1
        for one in ids:
            if self._own(one, principal) is not None:
                del self._held[one]
                self._over[principal.number, one] = SnapshotState.RELEASED
        return [self._state(one, principal) for one in ids]

    async def _captured(
        self, epoch: int, handles: NDArray[np.uint64], principal: Principal
    ) -> list[SequenceDescription]:
        """Sequences as they are once the captures may go on. Raises RequestError."""
        self.has_begun.set()
        await self.may_go_on.wait()
        self._refuse()
        told = self._table.describe(epoch, handles, principal)
        for one in told:
            if one.state is SequenceState.POISONED:
                raise RequestError(Reason.STATE_POISONED, "a computation on this state failed")
            if one.state is not SequenceState.OPEN:
                raise RequestError(*GONE[one.state])
            if any(span.pending_tokens for span in one.spans):
                raise RequestError(Reason.VERIFY_PENDING, "a verify waits for its commit")
            if len({span.position for span in one.spans}) > 1:
                raise RequestError(Reason.SPANS_UNEVEN, "the spans of a sequence are at different positions")
        return told

    def _open(self, origins: Sequence[tuple[str, int]], lease_s: float | None, principal: Principal) -> Opened:
        """Sequences with these adapters at these positions, all or none."""
        opened, ledger = list[Opened](), self._table.ledger
        try:
            for adapter, _ in origins:
                opened.append(self._table.open(1, lease_s, b"", adapter, principal))
        except RequestError:
            for one in opened:
                self._table.close(self._table.server_epoch, one.handles, principal)
            raise
        handles = np.concatenate([one.handles for one in opened])
        slots, _ = self._table.lookup(self._table.server_epoch, handles, principal)
        for slot, (_, position) in zip(slots.tolist(), origins, strict=True):
            ledger.done.position[:, slot] = ledger.tail.position[:, slot] = position
        return Opened(handles, opened[0].lease_s, opened[0].adapter)

    def _refuse(self) -> None:
        error, self.refuses = self.refuses, None
        if error is not None:
            raise error

    def _own(self, one: bytes, principal: Principal) -> _Held | None:
        self._reap()
        held = self._held.get(one)
        return held if held is not None and held.owner == principal.number else None

    def _state(self, one: bytes, principal: Principal) -> SnapshotState:
        if self._own(one, principal) is not None:
            return SnapshotState.HELD
        return self._over.get((principal.number, one), SnapshotState.UNKNOWN)

    def _reap(self) -> None:
        for one, held in [(one, held) for one, held in self._held.items() if held.deadline_s <= self._clock()]:
            del self._held[one]
            self._over[held.owner, one] = SnapshotState.EXPIRED


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are made from now on keep such states."""
    build = Runtime.build

    def built(config: Any, observer: Any, clock: Callable[[], float], call_soon: Any) -> Runtime:
        runtime = build(config, observer, clock, call_soon)
        return replace(runtime, states=StandInStates(runtime.table, clock))

    monkeypatch.setattr(Runtime, "build", built)
