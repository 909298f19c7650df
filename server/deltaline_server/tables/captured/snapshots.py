"""The snapshots: captured states with an id, an owner and a lease; and which of them give way when room is short.

An unpinned snapshot gives way to whatever needs its lines or pages, those first from which the least is expected.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import numpy as np

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.tables.captured.capture import Capture, Needs
from deltaline_server.tables.captured.device import DeviceTier
from deltaline_server.tables.captured.held import Held
from deltaline_server.tables.captured.lineage import Lineage
from deltaline_server.tables.captured.lower import LowerTiers, NoTiers
from deltaline_server.tables.captured.shares import Shares
from deltaline_server.tables.captured.snapshot import Snapshot, SnapshotDescription, SnapshotState, describe
from deltaline_server.tables.captured.state import CapturedState, StoredState
from deltaline_server.tables.ledger import CommittedProgress, Slots
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.prefixes.cost import ReusePolicy, StoredPrefix, Tier
from deltaline_server.tables.prefixes.index import Miss, Origin, PrefixIndex
from deltaline_server.tables.prefixes.keys import PrefixKeys
from deltaline_server.tables.prefixes.match import Match, match
from deltaline_server.tables.sequences import SequenceTable

ID_BYTES = 16
# Of snapshots that ended so many are remembered, so that their owner is told how.
ENDED = 4096
# Leases that run out in one tick, at most: their end took the event loop 6 to 24 ms, that of 61,440 it took 0.8 s
# (2 cores beside other work, no files, 2026-11-24).
REAPED_AT_ONCE = 512


class SnapshotTable:
    """The snapshots of all principals. All methods belong to the table's thread."""

    def __init__(
        self,
        *,
        table: SequenceTable,
        capture: Capture,
        line_bytes: int,
        page_bytes: int,
        fingerprint: bytes,
        lease_tick_s: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        stored_limit: int = 0,
    ) -> None:
        """fingerprint: of what this server's states mean. clock: monotonic seconds. wall_clock: seconds since 1970.
        stored_limit: snapshots that lie in lower tiers alone, at most."""
        self._table, self._capture, self._fingerprint = table, capture, fingerprint
        self._line_bytes, self._page_bytes = line_bytes, page_bytes
        self._clock, self._wall_clock, self._lease_tick_s = clock, wall_clock, lease_tick_s
        self._last_reap_s = clock()
        self._stored_limit = stored_limit
        self.lower: LowerTiers = NoTiers()
        """Where those may lie that give way on the device."""
        self._held = Held(ENDED)
        self.device = DeviceTier(table, capture, self._give_way)
        self.shares = Shares(table, self.device, self._held)
        self._index = PrefixIndex(self.device.limit + stored_limit, secrets.token_bytes(32))
        self._lineage = Lineage(table)
        self.num_captured = self.num_restored = self.num_evicted = self.num_expired = 0
        self.hits, self.misses = Counter[Tier](), Counter[Miss | None]()
        """Finds by the tier of what was found; by why nothing was, None where to compute is cheaper. States counts."""

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_pinned(self) -> int:
        return sum(self.device.num_pinned.values())

    # -- what sequences do -----------------------------------------------------------------------------------------

    def create(
        self,
        slots: Slots,
        progress: Sequence[CommittedProgress],
        principal: Principal,
        lease_s: float | None,
        is_pinned: bool,
        keys: Sequence[bytes] = (),
    ) -> list[SnapshotDescription]:
        """Capture the states of slots, as Capture.capture does, as snapshots of a principal: all or none.

        keys: under which each is found from now on, empty for none; as many as slots, or none at all. A state of no
        tokens is never found. Raises RequestError NO_SNAPSHOT_LINES, PAGES_EXHAUSTED, QUOTA_EXCEEDED or
        INVALID_REQUEST.
        """
        lease_s = self._table.checked_lease(lease_s)
        named = [PrefixKeys.one(key, at.position) for key, at in zip(keys or [b""] * len(slots), progress, strict=True)]
        self.shares.check_create(slots, principal, is_pinned)
        self.device.make_room(self._capture.needs(slots, progress), slots, len(slots))
        ids = []
        for slot, state, its in zip(slots.tolist(), self._capture.capture(slots, progress), named, strict=True):
            ids.append(self._add(state, its, self._lineage.of(slot), principal, lease_s, is_pinned))
            self._lineage.go_on(self._table.handles(np.array([slot])), ids[-1])
        return [self._description(id, self._held[id], self._clock()) for id in ids]

    def find(
        self, keys: PrefixKeys, adapter_hash: bytes, principal: Principal, policy: ReusePolicy, rate: float | None
    ) -> Match:
        """What a prompt of a principal may go on from under an adapter, empty for none. rate: prefill_tokens_per_s.
        Changes nothing."""
        found = self._index.find(keys, principal.number, self._origin(adapter_hash))
        return match(found, policy, prompt_tokens=keys.prompt_tokens, prefill_tokens_per_s=rate, ways=self.lower.ways)

    def notice(self, keys: PrefixKeys, adapter_hash: bytes, principal: Principal) -> None:
        """A prompt is prefilled: others that begin alike are told how far they do (Match.shared_position)."""
        self._index.notice(keys, principal.number, self._origin(adapter_hash))

    def restore(self, ids: Sequence[bytes], principal: Principal, lease_s: float | None) -> Opened:
        """Let a sequence of a principal begin from each snapshot; ids may repeat. All or none.

        Raises RequestError SNAPSHOT_UNKNOWN, PAGES_EXHAUSTED and as Capture.restore does.
        """
        states = [self._on_device(id, principal) for id in ids]
        self._table.checked_lease(lease_s)
        self._table.check_room(len(ids), principal)
        self.shares.check_restore(states, principal)
        self.device.make_room(self._capture.needs_of(states), kept=frozenset(ids))
        opened = self._capture.restore(states, 1, principal, lease_s)
        for i, id in enumerate(ids):
            self._lineage.go_on(opened.handles[i : i + 1], id)
        for id in dict.fromkeys(ids):
            self.device.eviction.consumed(id)
        self.num_restored += len(ids)
        return opened

    def fork(
        self,
        slots: Slots,
        progress: Sequence[CommittedProgress],
        count: int,
        principal: Principal,
        lease_s: float | None,
    ) -> Opened:
        """Let `count` sequences begin from the state of each slot, which goes on as well. All or none.

        Raises RequestError NO_SNAPSHOT_LINES and as `restore` does.
        """
        self._table.checked_lease(lease_s)
        self._table.check_room(count * len(slots), principal)
        self.shares.check_fork(slots, principal)
        self.device.make_room(self._capture.needs(slots, progress, count), slots)
        states = self._capture.capture(slots, progress)
        try:
            opened = self._capture.restore(states, count, principal, lease_s)
        finally:
            for state in states:
                self._capture.release(state)
        for i, slot in enumerate(slots.tolist()):
            self._lineage.go_on(opened.handles[i * count : (i + 1) * count], self._lineage.of(slot))
        return opened

    # -- waypoints -------------------------------------------------------------------------------------------------

    def adopt(
        self,
        slot: int,
        state: CapturedState,
        key: PrefixKeys | None,
        principal: Principal,
        lease_s: float | None,
        is_pinned: bool,
    ) -> bytes:
        """Let a captured state of a slot be a snapshot from now on; returns its id. Raises RequestError as `create`
        does; then the state is the caller's still."""
        self.shares.check(1, principal, is_pinned)
        self.device.make_room(Needs(), num_snapshots=1)
        lease_s, continues = self._table.checked_lease(lease_s), self._lineage.of(slot)
        id = self._add(state, key, continues, principal, lease_s, is_pinned)
        self._lineage.go_on(self._table.handles(np.array([slot])), id)
        return id

    # -- what owners do --------------------------------------------------------------------------------------------

    def describe(
        self, principal: Principal, after: bytes = b"", limit: int | None = None
    ) -> tuple[list[SnapshotDescription], bool]:
        """The snapshots of a principal behind an id, which need not be held, in the order of ids, at most `limit`; and
        whether there are more."""
        now_s, (page, is_more) = self._clock(), self._held.page(principal, after, limit)
        return [self._description(id, self._held[id], now_s) for id in page], is_more

    def renew(self, ids: Sequence[bytes], principal: Principal, lease_s: float | None) -> list[SnapshotState]:
        """Move deadlines to `lease_s` from now, or to the lease that each was created with."""
        if lease_s is not None:
            self._table.checked_lease(lease_s)
        states, now_s = [self._held.state(id, principal) for id in ids], self._clock()
        for id, state in zip(ids, states, strict=True):
            if state is SnapshotState.HELD:
                held = self._held[id]
                held.deadline_s = now_s + (held.lease_s if lease_s is None else lease_s)
        return states

    def release(self, ids: Sequence[bytes], principal: Principal) -> list[SnapshotState]:
        """End snapshots; sequences that began from them go on. Idempotent."""
        for id in ids:
            if self._held.state(id, principal) is SnapshotState.HELD:
                self.end(id, SnapshotState.RELEASED)
        return [self._held.state(id, principal) for id in ids]

    def reap(self) -> int:
        """End snapshots whose lease is over, REAPED_AT_ONCE at most; returns how many.

        After a stall of the whole process (this call comes late) owners had no chance to renew: it waits for the next.
        """
        now_s, last_s = self._clock(), self._last_reap_s
        self._last_reap_s = now_s
        if now_s - last_s > 2 * self._lease_tick_s:
            return 0
        over = list(islice((id for id, one in self._held.items() if one.deadline_s <= now_s), REAPED_AT_ONCE))
        for id in over:
            self.end(id, SnapshotState.EXPIRED)
        return len(over)

    def check_integrity(self) -> None:
        """Raise ValueError unless snapshots, captured states and counts agree."""
        self._table.check_integrity()
        near = {
            id: (one.state, one.owner.number, one.is_pinned)
            for id, one in self._held.items()
            if isinstance(one.state, CapturedState)
        }
        self.device.check_integrity(near)
        far = {id: one.state for id, one in self._held.items() if isinstance(one.state, StoredState)}
        if len(far) > self._stored_limit or any(self.lower.find(id) != state for id, state in far.items()):
            raise ValueError("snapshot table: snapshots lie elsewhere than is told, or there are too many")
        self._held.check_integrity()
        self._index.check_integrity(self._held)

    # -- what lower tiers do ---------------------------------------------------------------------------------------

    def get(self, id: bytes) -> Snapshot | None:
        """A snapshot that is held."""
        return self._held.get(id)

    def check_own(self, id: bytes, principal: Principal) -> None:
        """Raise RequestError SNAPSHOT_UNKNOWN unless a principal has such a snapshot."""
        self._held.find(id, principal)

    @contextmanager
    def using(self, id: bytes, copies: bool = False) -> Iterator[CapturedState | None]:
        """The state of a snapshot on the device, None for none, as DeviceTier.using and, for who copies it, `copying`
        keep it inside the context."""
        one = self._held.get(id)
        if one is None or not isinstance(one.state, CapturedState):
            yield None
            return
        state, keep = one.state, self.device.copying if copies else self.device.using
        with keep(id, state, one.is_pinned):
            yield state

    def arrived(self, id: bytes, state: CapturedState) -> None:
        """The state of a stored snapshot lies on the device now, as one that is used (Capture.bring). It is let go of
        if the snapshot is over, or others were faster."""
        one = self._held.get(id)
        if one is not None and isinstance(one.state, StoredState) and len(self.device) < self.device.limit:
            self._capture.leaving.remove(state)
            self._put(id, one, state, None)
            self._move(id, one, state)

    def relocated(self, id: bytes) -> None:
        """A lower tier has a state, or has it no more: a snapshot that does not lie on the device lies there, or in
        another, or has given way."""
        one = self._held.get(id)
        if one is not None and isinstance(one.state, StoredState):
            stored = self.lower.find(id)
            if stored is None:
                self.end(id, SnapshotState.EVICTED)
            else:
                self._move(id, one, stored)

    def add_stored(
        self,
        id: bytes,
        state: StoredState,
        owner: Principal,
        is_pinned: bool,
        created: float,
        key: bytes,
        lease_s: float | None = None,
    ) -> SnapshotDescription | None:
        """A state that another server made is a snapshot from now on; None, and nothing has changed, where too many lie
        in lower tiers alone. Raises RequestError INVALID_REQUEST for the lease or the key."""
        lease_s = self._table.checked_lease(lease_s)
        if self._num_stored >= self._stored_limit:
            return None
        one = Snapshot(state, owner, is_pinned, lease_s, self._clock() + lease_s, created, key)
        self._hold(id, one, PrefixKeys.one(key, state.position))
        return self._description(id, one, self._clock())

    @property
    def _num_stored(self) -> int:
        return len(self._held) - len(self.device)

    # -- one snapshot ----------------------------------------------------------------------------------------------

    def _add(
        self,
        state: CapturedState,
        keys: PrefixKeys | None,
        continues: bytes | None,
        owner: Principal,
        lease_s: float,
        is_pinned: bool,
    ) -> bytes:
        """Let a state be a snapshot, which is found by the one of `keys` that has its position. Returns its id."""
        id, deadline_s = secrets.token_bytes(ID_BYTES), self._clock() + lease_s
        key = b"" if keys is None else keys.key_at(state.position)
        one = Snapshot(state, owner, is_pinned, lease_s, deadline_s, self._wall_clock(), key)
        self._hold(id, one, keys)
        self._put(id, one, state, continues)
        self.num_captured += 1
        self.lower.added(id)
        return id

    def _hold(self, id: bytes, one: Snapshot, keys: PrefixKeys | None) -> None:
        self._held.add(id, one)
        number, state = one.owner.number, one.state
        if keys is not None:
            stored = StoredPrefix(state.position, id, state.tier, self._num_bytes(state))
            self._index.register(keys, number, self._origin(state.adapter.content_hash), stored)

    def _put(self, id: bytes, one: Snapshot, state: CapturedState, continues: bytes | None) -> None:
        """A snapshot takes room on the device from now on."""
        before = self._held.get(continues) if continues is not None else None
        num_own_pages = len(state.pages)
        if before is not None and isinstance(before.state, CapturedState):
            num_own_pages -= len(before.state.pages)
        self.device.put(id, state, one.owner.number, one.is_pinned, continues, max(1, num_own_pages))

    def _give_way(self, id: bytes) -> None:
        """A snapshot has to leave the device: it is over where it does not lie elsewhere."""
        one, stored = self._held[id], self.lower.find(id)
        if stored is None or self._num_stored >= self._stored_limit:
            self.end(id, SnapshotState.EVICTED)
        else:
            assert isinstance(one.state, CapturedState)
            self.device.take_off(id, one.state, one.owner.number, one.is_pinned)
            self._move(id, one, stored)

    def _move(self, id: bytes, one: Snapshot, state: CapturedState | StoredState) -> None:
        one.state = state
        self._index.moved(id, state.tier, self._num_bytes(state))

    def end(self, id: bytes, how: SnapshotState) -> None:
        """A snapshot is over. Idempotent."""
        if id not in self._held:
            return
        ended = self._held.end(id, how)
        if isinstance(ended.state, CapturedState):
            self.device.take_off(id, ended.state, ended.owner.number, ended.is_pinned)
        self.lower.forget(id)
        self._index.forget(id, is_evicted=how in (SnapshotState.EVICTED, SnapshotState.EXPIRED))
        self.num_evicted += how is SnapshotState.EVICTED
        self.num_expired += how is SnapshotState.EXPIRED

    def _on_device(self, id: bytes, principal: Principal) -> CapturedState:
        state = self._held.find(id, principal).state
        if isinstance(state, StoredState):
            message = "the snapshot gave way on the device before it could be used"
            raise RequestError(Reason.NO_SNAPSHOT_LINES, message, retry_after_s=0.05)
        return state

    def _description(self, id: bytes, one: Snapshot, now_s: float) -> SnapshotDescription:
        return describe(id, one, max(0.0, one.deadline_s - now_s), self._num_bytes(one.state))

    def _num_bytes(self, state: CapturedState | StoredState) -> int:
        if isinstance(state, StoredState):
            return state.num_bytes
        return state.num_lines * self._line_bytes + len(state.pages) * self._page_bytes

    def _origin(self, adapter_hash: bytes) -> Origin:
        return Origin(self._fingerprint, adapter_hash)
