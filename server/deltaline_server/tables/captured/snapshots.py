"""The snapshots: captured states with an id, an owner and a lease; and which of them give way when room is short.

An unpinned snapshot gives way to whatever needs its lines or pages, those first from which the least is expected.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal, check_share
from deltaline_server.tables.captured.capture import NO_SLOTS, Capture, Needs
from deltaline_server.tables.captured.ended import Ended
from deltaline_server.tables.captured.lineage import Lineage
from deltaline_server.tables.captured.room import Room
from deltaline_server.tables.captured.snapshot import Snapshot, SnapshotDescription, SnapshotState
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.ledger import CommittedProgress, Slots
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.prefixes.cost import ReusePolicy, StoredPrefix, Tier
from deltaline_server.tables.prefixes.eviction import Eviction
from deltaline_server.tables.prefixes.index import Miss, Origin, PrefixIndex
from deltaline_server.tables.prefixes.keys import PrefixKeys
from deltaline_server.tables.prefixes.match import Match, match
from deltaline_server.tables.sequence import slots_of
from deltaline_server.tables.sequences import SequenceTable

ID_BYTES = 16
# Of snapshots that ended so many are remembered, so that their owner is told how.
ENDED = 4096
# Snapshots for each line there is: those of a state that is captured again and again share its line.
PER_LINE = 4


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
    ) -> None:
        """fingerprint: of what this server's states mean. clock: monotonic seconds. wall_clock: seconds since 1970."""
        self._table, self._capture, self._fingerprint = table, capture, fingerprint
        self._line_bytes, self._page_bytes = line_bytes, page_bytes
        self._clock, self._wall_clock, self._lease_tick_s = clock, wall_clock, lease_tick_s
        self._last_reap_s = clock()
        self._limit = PER_LINE * (table.lines.num_lines + 1)
        self._held: dict[bytes, Snapshot] = {}
        # Of each owner, in order.
        self._ids: defaultdict[int, list[bytes]] = defaultdict(list)
        self._num_pinned: defaultdict[int, int] = defaultdict(int)
        self._ended = Ended(ENDED)
        self._index = PrefixIndex(self._limit, secrets.token_bytes(32))
        self._eviction = Eviction(self._limit)
        self.room = Room(self._eviction, table.lines, capture, table.ledger.num_spans)
        """What may give way."""
        self._lineage = Lineage(table)
        self.under_way: set[CapturedState] = set()
        """States that are no snapshots yet (waypoints.py)."""
        self.num_captured = self.num_restored = self.num_evicted = self.num_expired = 0
        self.hits, self.misses = Counter[Tier](), Counter[Miss | None]()
        """Finds by the tier of what was found; and by why nothing was, None where to compute is cheaper."""
        if table.pages is not None:
            table.pages.num_givable, table.pages.make_room = self.room.num_pages, self._make_room_for_pages

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_pinned(self) -> int:
        return sum(self._num_pinned.values())

    def num_of(self, principal: Principal) -> int:
        """Snapshots that a principal has."""
        return len(self._ids.get(principal.number, ()))

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
        self._check_share(len(slots), principal, is_pinned)
        self._make_room(self._capture.needs(slots, progress), slots, len(slots))
        ids = []
        for slot, state, its in zip(slots.tolist(), self._capture.capture(slots, progress), named, strict=True):
            ids.append(self._add(state, its, self._lineage.of(slot), principal, lease_s, is_pinned))
            self._lineage.goes_on(slot, ids[-1])
        return [self._description(id, self._held[id], self._clock()) for id in ids]

    def find(
        self,
        keys: PrefixKeys,
        adapter_hash: bytes,
        principal: Principal,
        policy: ReusePolicy,
        prefill_tokens_per_s: float | None,
    ) -> Match:
        """What a prompt of a principal may go on from under an adapter, empty for none. Changes nothing but counts."""
        found = self._index.find(keys, principal.number, self._origin(adapter_hash))
        rate = prefill_tokens_per_s
        taken = match(found, policy, prompt_tokens=keys.prompt_tokens, prefill_tokens_per_s=rate, ways={})
        if taken.prefix is None:
            self.misses[taken.miss] += 1
        else:
            self.hits[taken.prefix.tier] += 1
        return taken

    def notice(self, keys: PrefixKeys, adapter_hash: bytes, principal: Principal) -> None:
        """A prompt is prefilled: others that begin alike are told how far they do (Match.shared_position)."""
        self._index.notice(keys, principal.number, self._origin(adapter_hash))

    def restore(self, ids: Sequence[bytes], principal: Principal, lease_s: float | None) -> Opened:
        """Let a sequence of a principal begin from each snapshot; ids may repeat. All or none.

        Raises RequestError SNAPSHOT_UNKNOWN, PAGES_EXHAUSTED and as Capture.restore does.
        """
        states = [self._find(id, principal).state for id in ids]
        self._table.checked_lease(lease_s)
        self._table.check_room(len(ids), principal)
        self._make_room(self._capture.needs_of(states), kept=frozenset(ids))
        opened = self._capture.restore(states, 1, principal, lease_s)
        for slot, id in zip(slots_of(opened.handles).tolist(), ids, strict=True):
            self._lineage.goes_on(slot, id)
        for id in dict.fromkeys(ids):
            self._eviction.consumed(id)
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
        self._make_room(self._capture.needs(slots, progress, count), slots)
        states = self._capture.capture(slots, progress)
        try:
            opened = self._capture.restore(states, count, principal, lease_s)
        finally:
            for state in states:
                self._capture.release(state)
        parents = [slot for slot in slots.tolist() for _ in range(count)]
        for child, parent in zip(slots_of(opened.handles).tolist(), parents, strict=True):
            self._lineage.goes_on(child, self._lineage.of(parent))
        return opened

    # -- waypoints -------------------------------------------------------------------------------------------------

    def make_room_under_way(
        self, needs: Needs, slot: int, principal: Principal, is_pinned: bool, num_under_way: int
    ) -> None:
        """Let unpinned snapshots give way until what a state of a slot needs is there, which is to be a principal's
        snapshot; num_under_way: of those that it has already. Raises RequestError as `create` does; then none has."""
        self._check_share(needs.lines, principal, is_pinned, num_under_way)
        self._make_room(needs, np.array([slot]), len(self.under_way) + needs.lines)

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
        self._check_share(1, principal, is_pinned)
        self._make_room(Needs(), num_snapshots=1)
        lease_s, continues = self._table.checked_lease(lease_s), self._lineage.of(slot)
        id = self._add(state, key, continues, principal, lease_s, is_pinned)
        self._lineage.goes_on(slot, id)
        return id

    # -- what owners do --------------------------------------------------------------------------------------------

    def describe(
        self, principal: Principal, after: bytes = b"", limit: int | None = None
    ) -> tuple[list[SnapshotDescription], bool]:
        """The snapshots of a principal behind an id, which need not be held, in the order of ids, at most `limit`; and
        whether there are more."""
        now_s, own = self._clock(), self._ids.get(principal.number, [])
        first = bisect_right(own, after)
        page = own[first:] if limit is None else own[first : first + limit]
        return [self._description(id, self._held[id], now_s) for id in page], first + len(page) < len(own)

    def renew(self, ids: Sequence[bytes], principal: Principal, lease_s: float | None) -> list[SnapshotState]:
        """Move deadlines to `lease_s` from now, or to the lease that each was created with."""
        if lease_s is not None:
            self._table.checked_lease(lease_s)
        states, now_s = [self._state(id, principal) for id in ids], self._clock()
        for id, state in zip(ids, states, strict=True):
            if state is SnapshotState.HELD:
                held = self._held[id]
                held.deadline_s = now_s + (held.lease_s if lease_s is None else lease_s)
        return states

    def release(self, ids: Sequence[bytes], principal: Principal) -> list[SnapshotState]:
        """End snapshots; sequences that began from them go on. Idempotent."""
        for id in ids:
            if self._state(id, principal) is SnapshotState.HELD:
                self._end(id, SnapshotState.RELEASED)
        return [self._state(id, principal) for id in ids]

    def reap(self) -> int:
        """End snapshots whose lease is over; returns how many.

        After a stall of the whole process (this call comes late) owners had no chance to renew: it waits for the next.
        """
        now_s, last_s = self._clock(), self._last_reap_s
        self._last_reap_s = now_s
        if now_s - last_s > 2 * self._lease_tick_s:
            return 0
        over = [id for id, one in self._held.items() if one.deadline_s <= now_s]
        for id in over:
            self._end(id, SnapshotState.EXPIRED)
        return len(over)

    def check_integrity(self) -> None:
        """Raise ValueError unless snapshots, captured states and counts agree."""
        self._table.check_integrity()
        if {one.state for one in self._held.values()} | self.under_way != self._table.captured:
            raise ValueError("snapshot table: snapshots and captured states disagree")
        ids = {number: own for number, own in self._ids.items() if own}
        pinned = Counter(one.owner.number for one in self._held.values() if one.is_pinned)
        if ids != _by_owner(self._held) or pinned != +Counter(self._num_pinned) or len(self._held) > self._limit:
            raise ValueError("snapshot table: principals and their counts disagree")
        self._index.check_integrity(self._held)
        self.room.check_integrity({id: one.state for id, one in self._held.items() if not one.is_pinned})

    # -- room ------------------------------------------------------------------------------------------------------

    def _make_room(
        self, needs: Needs, slots: Slots = NO_SLOTS, num_snapshots: int = 0, kept: Collection[bytes] = ()
    ) -> None:
        """Let unpinned snapshots, but those to be kept, give way until what is needed is there; slots: that need it.

        Raises RequestError NO_SNAPSHOT_LINES or PAGES_EXHAUSTED; then none has.
        """
        lines, pages = self._table.lines, self._table.pages
        if needs.lines > lines.num_freezable:
            self._capture.thaw(slots)
        num_over = len(self._held) + num_snapshots - self._limit
        lacking = Needs(needs.lines - lines.num_freezable, 0 if pages is None else needs.pages - pages.num_free)
        for id in self.room.victims(lacking, num_over, slots, kept):
            self._end(id, SnapshotState.EVICTED)
        if needs.lines > lines.num_freezable:
            self._capture.thaw(slots)

    def _make_room_for_pages(self, num_pages: int) -> None:
        """Let unpinned snapshots give way until so many more pages are free. Raises RequestError PAGES_EXHAUSTED."""
        for id in self.room.victims(Needs(pages=num_pages), 0, NO_SLOTS):
            self._end(id, SnapshotState.EVICTED)

    def _check_share(self, count: int, principal: Principal, is_pinned: bool, num_under_way: int = 0) -> None:
        """Raise RequestError QUOTA_EXCEEDED, or NO_SNAPSHOT_LINES where what does not give way, pinned ones and states
        under way, would be more than is left to others."""
        if principal.quotas is not None:
            principal.quotas.check("snapshots", self.num_of(principal) + num_under_way, count)
        if count and (is_pinned or num_under_way) and principal.number and not principal.is_alone:
            held = self._num_pinned[principal.number] + num_under_way
            free = self._table.lines.snapshot_lines - self.num_pinned - len(self.under_way)
            check_share(held, count, free, "pinned snapshots and states under way", Reason.NO_SNAPSHOT_LINES)

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
        id, number = secrets.token_bytes(ID_BYTES), owner.number
        deadline_s = self._clock() + lease_s
        before = self._held.get(continues) if continues is not None else None
        num_own_pages = len(state.pages) - (0 if before is None else len(before.state.pages))
        self.num_captured += 1
        self._held[id] = Snapshot(state, owner, is_pinned, lease_s, deadline_s, self._wall_clock())
        insort(self._ids[number], id)
        self._eviction.stored(id, state.position, continues, owner=number, size=max(1, num_own_pages))
        if is_pinned:
            self._num_pinned[number] += 1
            self._eviction.pin(id, True)
        else:
            self.room.add(id, state)
        if keys is not None:
            stored = StoredPrefix(state.position, id, Tier.DEVICE, self._num_bytes(state))
            self._index.register(keys, number, self._origin(state.adapter.content_hash), stored)
        return id

    def _end(self, id: bytes, how: SnapshotState) -> None:
        ended = self._held.pop(id)
        number = ended.owner.number
        own = self._ids[number]
        del own[bisect_left(own, id)]
        self._num_pinned[number] -= ended.is_pinned
        self.room.remove(id)
        self._eviction.gone(id)
        self._capture.release(ended.state)
        self._index.forget(id, is_evicted=how in (SnapshotState.EVICTED, SnapshotState.EXPIRED))
        self._ended.add(id, number, how)
        self.num_evicted += how is SnapshotState.EVICTED
        self.num_expired += how is SnapshotState.EXPIRED

    def _state(self, id: bytes, principal: Principal) -> SnapshotState:
        """What became of an id; another principal's snapshot is UNKNOWN."""
        held = self._held.get(id)
        if held is not None:
            return SnapshotState.HELD if held.owner.number == principal.number else SnapshotState.UNKNOWN
        return self._ended.get(id, principal.number) or SnapshotState.UNKNOWN

    def _find(self, id: bytes, principal: Principal) -> Snapshot:
        state = self._state(id, principal)
        if state is SnapshotState.HELD:
            return self._held[id]
        message = {
            SnapshotState.EXPIRED: "the snapshot's lease ran out",
            SnapshotState.RELEASED: "the snapshot was released",
            SnapshotState.EVICTED: "the snapshot gave way to others",
        }.get(state, "no snapshot has this id")
        raise RequestError(Reason.SNAPSHOT_UNKNOWN, message, metadata={"state": state.name})

    def _description(self, id: bytes, one: Snapshot, now_s: float) -> SnapshotDescription:
        state = one.state
        return SnapshotDescription(
            id,
            state.position,
            state.adapter.name,
            state.adapter.content_hash,
            one.is_pinned,
            max(0.0, one.deadline_s - now_s),
            self._num_bytes(state),
            Tier.DEVICE,
            one.created,
        )

    def _num_bytes(self, state: CapturedState) -> int:
        return state.num_lines * self._line_bytes + len(state.pages) * self._page_bytes

    def _origin(self, adapter_hash: bytes) -> Origin:
        return Origin(self._fingerprint, adapter_hash)


def _by_owner(held: Mapping[bytes, Snapshot]) -> dict[int, list[bytes]]:
    """The ids of each owner in order."""
    ids: dict[int, list[bytes]] = {}
    for id in sorted(held):
        ids.setdefault(held[id].owner.number, []).append(id)
    return ids
