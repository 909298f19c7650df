"""What is asked of states: to be kept, to be gone on from, and to be let go."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.scheduling.scheduler import Scheduler
from deltaline_server.snapshots.exchange import Exchange
from deltaline_server.snapshots.header import ID_BYTES, StateHeader
from deltaline_server.snapshots.sequences.coming import Coming, Wholes
from deltaline_server.tables.captured.capture import Capture
from deltaline_server.tables.captured.snapshot import SnapshotDescription, SnapshotState
from deltaline_server.tables.captured.snapshots import SnapshotTable
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.moved import Owner
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.prefixes.cost import ReusePolicy
from deltaline_server.tables.prefixes.keys import PrefixKeys
from deltaline_server.tables.prefixes.match import Match
from deltaline_server.tables.sequence import SequenceState
from deltaline_server.tables.sequences import SequenceTable

# How often a snapshot is brought back for one call, at most.
BRINGS = 3

Result = TypeVar("Result")


class Tiering(Protocol):
    """What moves snapshots between the tiers: a Moves, of which front ends must not know that it needs torch."""

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
        moves: Tiering | None = None,
        exchange: Exchange | None = None,
        wholes: Wholes | None = None,
    ) -> None:
        """moves, exchange, wholes: None where there are no tiers but the device."""
        self._moves, self.exchange, self._wholes = moves, exchange, wholes
        self._copies = set[asyncio.Future[None]]()
        self._leaving = dict[tuple[int, int], asyncio.Event]()
        """When those that are leaving do so no more: by their principal's number, and handle."""
        self._table, self._capture, self.snapshots, self._scheduler = table, capture, snapshots, scheduler

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

        return await self._in_order(epoch, handles, principal, create)

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

        return await self._in_order(epoch, handles, principal, fork)

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
        """The same for what `find` finds, which is told as it was before."""
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

    def describe(
        self, principal: Principal, after: bytes = b"", limit: int | None = None
    ) -> tuple[list[SnapshotDescription], bool]:
        """A page of the snapshots of a principal, and whether there are more, as SnapshotTable.describe tells them."""
        return self.snapshots.describe(principal, after, limit)

    def renew(self, ids: Sequence[bytes], principal: Principal, *, lease_s: float | None) -> list[SnapshotState]:
        """Renew leases, for the time that each was created with where lease_s is None. Raises RequestError
        INVALID_REQUEST for a lease that there can't be."""
        return self.snapshots.renew(ids, principal, lease_s)

    def release(self, ids: Sequence[bytes], principal: Principal) -> list[SnapshotState]:
        """End snapshots. Idempotent."""
        return self.snapshots.release(ids, principal)

    def reap(self) -> None:
        """End snapshots that have outlived their lease."""
        self.snapshots.reap()

    def check_integrity(self) -> None:
        """Raise ValueError unless all that is counted agrees."""
        self.snapshots.check_integrity()

    async def find_stored(self, number_of: Callable[[str], int | None]) -> None:
        """Find the snapshots that an earlier server left in files, as Moves.find_all does."""
        if self._moves is not None:
            await self._moves.find_all(number_of)

    async def close(self) -> None:
        """Finish what is copied between the tiers. Idempotent."""
        await asyncio.gather(*self._copies, return_exceptions=True)
        try:
            if self._moves is not None:
                await self._moves.close()
        finally:
            if self.exchange is not None:
                await self.exchange.close()

    def existing_exchange(self) -> Exchange:
        """What states go by. Raises RequestError HOST_TIER_OFF where there is none."""
        if self.exchange is None:
            message = "this server keeps no states in host memory, by way of which they go: it needs --host-state-bytes"
            raise RequestError(Reason.HOST_TIER_OFF, message)
        return self.exchange

    @asynccontextmanager
    async def stored(
        self, epoch: int, handles: NDArray[np.uint64], owner: Principal, *, is_leaving: bool = False, ahead: int = 0
    ) -> AsyncIterator[bytes]:
        """Inside the context the whole of a principal's sequence, handles uint64 [1], lies in host memory, as it is
        behind the steps that were taken so far; later ones wait until it is copied. Returns its id there, which nobody
        else knows. is_leaving: whether they wait until the context is over, and commits too (`until_none_leaves`).
        ahead: leading tokens whose pages are left out.

        Raises RequestError as `create` does, but for VERIFY_PENDING and SPANS_UNEVEN.
        """
        wholes, id, is_over = self._wholes, secrets.token_bytes(ID_BYTES), asyncio.Event()
        key, copying = (owner.number, int(handles[0])), asyncio.Future[None]()
        assert wholes is not None

        def take(slots: Slots) -> asyncio.Future[None]:
            nonlocal copying
            copying = self._copying(copy(wholes.read(id, int(slots[0]), owner, ahead)))
            if not is_leaving:
                return copying
            self._leaving[key] = is_over
            return asyncio.ensure_future(leave(copying))

        async def copy(whole: Any) -> None:
            # It goes on when the call ends: the device reads what no step may write meanwhile.
            await wholes.store(whole)
            if is_over.is_set():
                wholes.forget(id)

        async def leave(copying: asyncio.Future[None]) -> None:
            await asyncio.wait([copying])
            await is_over.wait()

        try:
            await self._in_order(epoch, handles, owner, take)
            await asyncio.shield(copying)
            self._held(epoch, handles, owner)  # else what was copied may be another's by now
            yield id
        finally:
            is_over.set()
            if self._leaving.get(key) is is_over:
                del self._leaving[key]
            wholes.forget(id)

    async def until_none_leaves(self, handles: NDArray[np.uint64], principal: Principal) -> None:
        """Wait until none of a principal's sequences is leaving: its commits would be left behind."""
        while self._leaving:
            waits = [self._leaving.get((principal.number, handle)) for handle in handles.tolist()]
            leaving = next(filter(None, waits), None)
            if leaving is None:
                return
            await leaving.wait()

    def lease_s(self, epoch: int, handles: NDArray[np.uint64], owner: Principal) -> float:
        """The length of an open sequence's lease, handles uint64 [1]. Raises RequestError as `stored` does."""
        return self._table.lease_s(int(self._held(epoch, handles, owner)[0]))

    def let_go(self, epoch: int, handles: NDArray[np.uint64], owner: Principal, lives_at: Owner) -> None:
        """A principal's sequence that is leaving, handles uint64 [1], lives there from now on. Raises RequestError
        as `stored` does where it is over by now; then it does not."""
        self._table.let_go(int(self._held(epoch, handles, owner)[0]), lives_at)

    def num_settled(self, epoch: int, handles: NDArray[np.uint64], owner: Principal) -> int:
        """Leading tokens of a sequence, handles uint64 [1], whose keys and values no step writes any more. Raises
        RequestError as `stored` does."""
        assert self._wholes is not None
        return self._wholes.num_settled(int(self._held(epoch, handles, owner)[0]))

    @asynccontextmanager
    async def stored_pages(
        self, epoch: int, handles: NDArray[np.uint64], owner: Principal, begin: int, end: int
    ) -> AsyncIterator[bytes]:
        """Inside the context keys and values of a sequence's settled tokens `begin` .. `end`, whole pages of them, lie
        in host memory, under this id; it is stepped meanwhile. Raises RequestError as `stored` does."""
        wholes, id = self._wholes, secrets.token_bytes(ID_BYTES)
        assert wholes is not None

        async def copy() -> None:  # begins a turn later
            await wholes.store_pages(id, int(self._held(epoch, handles, owner)[0]), owner, begin, end)

        try:
            await asyncio.shield(self._copying(copy()))
            self._held(epoch, handles, owner)  # else what was copied may be another's by now
            yield id
        finally:
            wholes.forget(id)

    @contextmanager
    def coming(self, owner: Principal) -> Iterator[Coming]:
        """A principal's sequence of which pages may come ahead of the rest; nothing is left of it behind the context
        unless it was handed over."""
        assert self._wholes is not None
        coming = Coming(self._wholes, owner)
        try:
            yield coming
        finally:
            coming.end()

    async def open_stored(
        self, header: StateHeader, owner: Principal, lease_s: float | None, slot: int | None = None
    ) -> NDArray[np.uint64]:
        """Open a sequence that goes on where one in host memory stood; as WholeSequences.open."""
        assert self._wholes is not None
        return await self._wholes.open(header, owner, lease_s, slot)

    def _copying(self, copy: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Let a copy go on to its end, whoever asked for it."""
        copying = asyncio.ensure_future(copy)
        self._copies.add(copying)
        copying.add_done_callback(self._copied)
        return copying

    def _copied(self, copying: asyncio.Future[None]) -> None:
        self._copies.discard(copying)
        if not copying.cancelled():
            copying.exception()  # who asked may have gone

    async def _in_order(
        self,
        epoch: int,
        handles: NDArray[np.uint64],
        principal: Principal,
        work: Callable[[Slots], Result],
    ) -> Result:
        """The result of work on sequences' states, when the steps that were taken so far are over; nothing is done for
        whoever has gone meanwhile. Where it is a future, later steps wait until that is done."""
        if len(np.unique(handles)) != len(handles):
            raise RequestError(Reason.DUPLICATE_SEQUENCE, "sequence: expected none twice", field="sequence")
        slots = self._held(epoch, handles, principal)
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def on_reached(dropped: set[int]) -> asyncio.Future[Any] | None:
            if done.done():
                return None
            try:
                self._held(epoch, handles, principal)
                if dropped:
                    message = "a step before this call was refused, so nothing was done"
                    raise RequestError(Reason.PREDECESSOR_REFUSED, message)
                result = work(slots)
                done.set_result(result)
            except Exception as error:
                done.set_exception(error)
                return None
            return result if isinstance(result, asyncio.Future) else None

        self._scheduler.in_order(slots, on_reached)
        return await done

    def _held(self, epoch: int, handles: NDArray[np.uint64], principal: Principal) -> Slots:
        """The slots of sequences that are open. Raises RequestError where one is not, or its state is not finite."""
        slots, states = self._table.lookup(epoch, handles, principal)
        for row, (slot, state) in enumerate(zip(slots.tolist(), states.tolist(), strict=True)):
            if state == SequenceState.POISONED:
                message = "a computation on the sequence's state failed or gave a value that is not finite"
                raise RequestError(Reason.STATE_NOT_FINITE, message)
            if state != SequenceState.OPEN:
                refusal = self._table.moved_refusals(epoch, handles, states, principal).get(row)
                refusal = (refusal or self._table.refusal(state, slot, 0)).of_row(row)
                raise RequestError(refusal.reason, refusal.message, metadata=refusal.metadata)
        self._table.touch(slots)
        return slots
