"""The snapshots: captured states with an id, an owner and a lease; and which of them give way when room is short.

An unpinned snapshot gives way to whatever needs its lines or pages, the least recently used first.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import Principal
from deltaline_server.tables.captured.capture import NO_SLOTS, Capture, Needs
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.ledger import CommittedProgress, Slots
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.prefixes.cost import ReusePolicy, StoredPrefix, Tier
from deltaline_server.tables.prefixes.index import Origin, PrefixIndex
from deltaline_server.tables.prefixes.keys import PrefixKeys
from deltaline_server.tables.prefixes.match import Match, match
from deltaline_server.tables.sequences import SequenceTable

ID_BYTES = 16
# Of snapshots that ended so many are remembered, so that their owner is told how.
ENDED = 4096
# Snapshots for each line there is: those of a state that is captured again and again share its line.
PER_LINE = 4


class SnapshotState(IntEnum):
    """What became of a snapshot."""

    HELD = 1
    UNKNOWN = 2
    EXPIRED = 3
    RELEASED = 4
    EVICTED = 5
    LOST = 6


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
class _Snapshot:
    state: CapturedState
    owner: Principal
    is_pinned: bool
    lease_s: float
    deadline_s: float
    created: float


class SnapshotTable:
    """The snapshots of all principals, the least recently used first. All methods belong to the table's thread."""

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
        self._held: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._index = PrefixIndex(self._limit, secrets.token_bytes(32))
        self._ended: OrderedDict[bytes, tuple[int, SnapshotState]] = OrderedDict()
        self.num_of: defaultdict[int, int] = defaultdict(int)
        """Snapshots that are held, by their owner's number."""
        self.num_evicted = self.num_expired = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

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
        if principal.quotas is not None:
            principal.quotas.check("snapshots", self.num_of[principal.number], len(slots))
        self._make_room(self._capture.needs(slots, progress), slots, len(slots))
        states = self._capture.capture(slots, progress)
        ids = [self._add(*one, principal, lease_s, is_pinned) for one in zip(states, named, strict=True)]
        return [self._description(id, self._held[id], self._clock()) for id in ids]

    def find(
        self,
        keys: PrefixKeys,
        adapter_hash: bytes,
        principal: Principal,
        policy: ReusePolicy,
        prefill_tokens_per_s: float | None,
    ) -> Match:
        """What a prompt of a principal may go on from under an adapter, empty for none. Changes nothing."""
        found = self._index.find(keys, principal.number, self._origin(adapter_hash))
        rate = prefill_tokens_per_s
        return match(found, policy, prompt_tokens=keys.prompt_tokens, prefill_tokens_per_s=rate, ways={})

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
        for id in ids:
            self._held.move_to_end(id)
        self._make_room(self._capture.needs_of(states), kept=frozenset(ids))
        return self._capture.restore(states, 1, principal, lease_s)

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
            return self._capture.restore(states, count, principal, lease_s)
        finally:
            for state in states:
                self._capture.release(state)

    def make_room_for_pages(self, num_pages: int) -> None:
        """Let unpinned snapshots give way until so many more pages are free, or none that has pages is left."""
        self._give_way(self._victims(Needs(pages=num_pages), 0, NO_SLOTS, frozenset())[0])

    # -- what owners do --------------------------------------------------------------------------------------------

    def describe(self, principal: Principal) -> list[SnapshotDescription]:
        """The snapshots of a principal, the oldest first."""
        now_s = self._clock()
        own = [(id, one) for id, one in self._held.items() if one.owner.number == principal.number]
        own.sort(key=lambda item: item[1].created)
        return [self._description(id, one, now_s) for id, one in own]

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
        self.num_expired += len(over)
        return len(over)

    def check_integrity(self) -> None:
        """Raise ValueError unless snapshots, captured states and counts agree."""
        self._table.check_integrity()
        if {one.state for one in self._held.values()} != self._table.captured:
            raise ValueError("snapshot table: snapshots and captured states disagree")
        counts: defaultdict[int, int] = defaultdict(int)
        for one in self._held.values():
            counts[one.owner.number] += 1
        if any(count != counts[number] for number, count in self.num_of.items()) or len(self._held) > self._limit:
            raise ValueError("snapshot table: principals and their counts disagree")
        self._index.check_integrity(self._held)

    # -- room ------------------------------------------------------------------------------------------------------

    def _make_room(
        self, needs: Needs, slots: Slots = NO_SLOTS, num_snapshots: int = 0, kept: frozenset[bytes] = frozenset()
    ) -> None:
        """Let unpinned snapshots, but those to be kept, give way until what is needed is there; slots: that need it.

        Raises RequestError NO_SNAPSHOT_LINES or PAGES_EXHAUSTED; then none has.
        """
        lines, pages = self._table.lines, self._table.pages
        if needs.lines > lines.num_freezable:
            self._capture.thaw(slots)
        short = Needs(
            max(0, needs.lines - lines.num_freezable), 0 if pages is None else max(0, needs.pages - pages.num_free)
        )
        num_over = len(self._held) + num_snapshots - self._limit
        victims, given = self._victims(short, num_over, slots, kept)
        if given.lines < short.lines or len(victims) < num_over:
            message = (
                f"{needs.lines} lines asked for, {lines.num_freezable + given.lines} of {lines.snapshot_lines} for "
                "snapshots can be had; the others are pinned, or sequences have yet to step on"
            )
            raise RequestError(Reason.NO_SNAPSHOT_LINES, message, retry_after_s=1.0)
        if given.pages < short.pages:
            assert pages is not None
            message = f"{needs.pages} pages asked for, {pages.num_free + given.pages} can be had"
            raise RequestError(Reason.PAGES_EXHAUSTED, message, retry_after_s=0.05)
        self._give_way(victims)
        if needs.lines > lines.num_freezable:
            self._capture.thaw(slots)

    def _give_way(self, victims: Sequence[bytes]) -> None:
        for id in victims:
            self._end(id, SnapshotState.EVICTED)
        self.num_evicted += len(victims)

    def _victims(self, needs: Needs, count: int, slots: Slots, kept: frozenset[bytes]) -> tuple[list[bytes], Needs]:
        """Unpinned snapshots, the least recently used first, whose end gives what is needed, or as much of it as there
        is, and which are `count` at least; and what it gives. None goes in vain."""
        left, given, victims = self._capture.holders(slots), Needs(), list[bytes]()
        for id, one in self._held.items():
            if given.lines >= needs.lines and given.pages >= needs.pages and len(victims) >= count:
                break
            if not one.is_pinned and id not in kept:
                given += left.drop(one.state)
                victims.append(id)
        wanted = Needs(min(needs.lines, given.lines), min(needs.pages, given.pages))
        for id in victims[::-1]:
            less = given - left.take_back(self._held[id].state)
            if less.lines >= wanted.lines and less.pages >= wanted.pages and len(victims) > count:
                given = less
                victims.remove(id)
            else:
                left.drop(self._held[id].state)
        return victims, given

    # -- one snapshot ----------------------------------------------------------------------------------------------

    def _add(
        self, state: CapturedState, keys: PrefixKeys | None, owner: Principal, lease_s: float, is_pinned: bool
    ) -> bytes:
        """Let a state be a snapshot, which is found by the one of `keys` that has its position. Returns its id."""
        id = secrets.token_bytes(ID_BYTES)
        deadline_s = self._clock() + lease_s
        self._held[id] = _Snapshot(state, owner, is_pinned, lease_s, deadline_s, self._wall_clock())
        self.num_of[owner.number] += 1
        if keys is not None:
            stored = StoredPrefix(state.position, id, Tier.DEVICE, self._num_bytes(state))
            self._index.register(keys, owner.number, self._origin(state.adapter.content_hash), stored)
        return id

    def _end(self, id: bytes, how: SnapshotState) -> None:
        ended = self._held.pop(id)
        self.num_of[ended.owner.number] -= 1
        self._capture.release(ended.state)
        self._index.forget(id, is_evicted=how in (SnapshotState.EVICTED, SnapshotState.EXPIRED))
        self._ended[id] = ended.owner.number, how
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)

    def _state(self, id: bytes, principal: Principal) -> SnapshotState:
        """What became of an id; another principal's snapshot is UNKNOWN."""
        held = self._held.get(id)
        if held is not None:
            return SnapshotState.HELD if held.owner.number == principal.number else SnapshotState.UNKNOWN
        owner, how = self._ended.get(id, (None, SnapshotState.UNKNOWN))
        return how if owner == principal.number else SnapshotState.UNKNOWN

    def _find(self, id: bytes, principal: Principal) -> _Snapshot:
        state = self._state(id, principal)
        if state is SnapshotState.HELD:
            return self._held[id]
        message = {
            SnapshotState.EXPIRED: "the snapshot's lease ran out",
            SnapshotState.RELEASED: "the snapshot was released",
            SnapshotState.EVICTED: "the snapshot gave way to others",
        }.get(state, "no snapshot has this id")
        raise RequestError(Reason.SNAPSHOT_UNKNOWN, message, metadata={"state": state.name})

    def _description(self, id: bytes, one: _Snapshot, now_s: float) -> SnapshotDescription:
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
