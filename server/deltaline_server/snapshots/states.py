"""Creates, finds, restores and forks snapshots, each in the order of its sequence's steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.snapshots.sequences.in_order import InOrder
from deltaline_server.tables.captured.capture import Capture
from deltaline_server.tables.captured.snapshot import SnapshotDescription
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.prefixes.cost import ReusePolicy
from deltaline_server.tables.prefixes.keys import PrefixKeys
from deltaline_server.tables.prefixes.match import Match
from deltaline_server.tables.sequences import SequenceTable

# How often a snapshot is brought back for one call, at most.
BRINGS = 3


class Tiering(Protocol):
    """What moves snapshots between the tiers: a Moves, which imports torch, as front ends must not."""

    async def find_all(self, number_of: Callable[[str], int | None]) -> None: ...
    async def bring_back(self, id: bytes) -> None: ...
    async def close(self) -> None: ...


class States:
    """Snapshots and forks of sequences. All methods belong to the event loop's thread; each does all or nothing.

    A snapshot and a fork have their place in the order of each sequence's steps: behind those that were taken before,
    and those that come meanwhile wait.
    """

    def __init__(
        self,
        *,
        table: SequenceTable,
        capture: Capture,
        snapshots: SnapshotTable,
        scheduler: Scheduler,
        in_order: InOrder,
        moves: Tiering | None = None,
    ) -> None:
        """moves: None where there are no tiers but the device."""
        self._table, self._capture, self.snapshots, self._scheduler = table, capture, snapshots, scheduler
        self._in_order, self._moves = in_order, moves

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
        """A snapshot of each sequence, handles uint64 [N], found by its key: as many as handles (empty for none), or
        none at all.

        Raises RequestError: those of sequences (SEQUENCE_UNKNOWN ...), DUPLICATE_SEQUENCE, VERIFY_PENDING,
        SPANS_UNEVEN, STATE_NOT_FINITE, PREDECESSOR_REFUSED, and as SnapshotTable.create does.
        """

        def create(slots: Slots) -> list[SnapshotDescription]:
            return self.snapshots.create(slots, self._capture.progress(slots), principal, lease_s, is_pinned, keys)

        return await self._in_order.run(epoch, handles, principal, create)

    async def fork(
        self,
        epoch: int,
        handles: NDArray[np.uint64],
        count: int,
        principal: Principal,
        *,
        lease_s: float | None,
    ) -> Opened:
        """`count` children of each sequence, those of the first one first; handles uint64 [N].

        Raises RequestError as `create` does, INVALID_REQUEST, and as SnapshotTable.fork does.
        """
        if not 1 <= count <= self._table.num_slots:
            message = f"count: expected 1 .. {self._table.num_slots}, got {count}"
            raise RequestError(Reason.INVALID_REQUEST, message, field="count")

        def fork(slots: Slots) -> Opened:
            return self.snapshots.fork(slots, self._capture.progress(slots), count, principal, lease_s)

        return await self._in_order.run(epoch, handles, principal, fork)

    @asynccontextmanager
    async def near(self, ids: Sequence[bytes], principal: Principal) -> AsyncIterator[None]:
        """Inside the context a principal's snapshots lie on the device, also those that were in other tiers. Ids may
        repeat; those of none, and of another's, are passed over.

        Raises RequestError as Moves.bring_back does, and as SequenceTable.check_room where so many could not begin.
        """
        with ExitStack() as used:
            for id in dict.fromkeys(ids):
                one = self.snapshots.get(id)
                if one is None or one.owner.number != principal.number:
                    continue
                # Once more where it gave way again before it could be used.
                for _ in range(BRINGS):
                    if used.enter_context(self.snapshots.using(id)) is not None:
                        break
                    one = self.snapshots.get(id)
                    if self._moves is not None and one is not None and one.is_far(principal):
                        self._table.check_room(len(ids), principal)
                        self.snapshots.shares.check_pinned(1, principal, one.is_pinned)
                        await self._moves.bring_back(id)
            yield

    @asynccontextmanager
    async def near_found(
        self, keys: PrefixKeys, adapter_hash: bytes, principal: Principal, policy: ReusePolicy
    ) -> AsyncIterator[Match]:
        """Find the beginning of a prompt and, inside the context, have its snapshot on the device. The match tells in
        which tier it was."""
        while (found := self.find(keys, adapter_hash, principal, policy)).prefix is not None:
            id = found.prefix.snapshot
            async with self.near([id], principal):
                if self.snapshots.get(id) is not None:  # it was not lost, nor released, on its way
                    yield found
                    return
        yield found

    def restore(self, ids: Sequence[bytes], principal: Principal, *, lease_s: float | None) -> Opened:
        """One sequence of each snapshot, which lies on the device (`near`); ids may repeat.

        Raises RequestError as SnapshotTable.restore does.
        """
        self._scheduler.settle()
        return self.snapshots.restore(ids, principal, lease_s)

    def find(self, keys: PrefixKeys, adapter_hash: bytes, principal: Principal, policy: ReusePolicy) -> Match:
        """What a prompt of a principal may go on from under an adapter, by its content hash, empty for none. Changes
        nothing but counts."""
        rate = self._scheduler.prefill_tokens_per_s
        found = self.snapshots.find(keys, adapter_hash, principal, policy, rate)
        if found.prefix is None:
            self.snapshots.misses[found.miss] += 1
        else:
            self.snapshots.hits[found.prefix.tier] += 1
        return found

    def open(
        self,
        found: Match,
        keys: PrefixKeys,
        adapter_hash: bytes,
        principal: Principal,
        *,
        count: int,
        lease_s: float | None,
        otherwise: Callable[[], Opened],
    ) -> Opened:
        """`count` sequences that begin with what was found of a prompt and lies on the device (`near_found`), or, where
        that is nothing, what `otherwise` opens.

        Raises RequestError as SnapshotTable.restore does, and what `otherwise` raises; then nothing has changed.
        """
        if found.prefix is None:
            opened = otherwise()
        else:
            opened = self.restore([found.prefix.snapshot] * count, principal, lease_s=lease_s)
        self.snapshots.notice(keys, adapter_hash, principal)
        return replace(opened, match=found)

    async def find_stored(self, number_of: Callable[[str], int | None]) -> None:
        """Find the snapshots that an earlier server left in files, as Moves.find_all does."""
        if self._moves is not None:
            await self._moves.find_all(number_of)

    async def close(self) -> None:
        """Finish what is copied between the tiers. Idempotent."""
        if self._moves is not None:
            await self._moves.close()
