"""The sequence table: leases and life cycle of sequences, as arrays by slot.

What names a slot's sequence is in Handles, its progress in the ledger, its kept replies in `replies`, its state in a
line of the pool. Time is the `clock` argument (monotonic seconds).

Life of a slot: FREE -> open -> OPEN (-> POISONED) -> close or lease over -> [CLOSING while steps are in flight] -> FREE
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.tables.captured.state import CapturedState, count_references
from deltaline_server.tables.handles import Handles
from deltaline_server.tables.kept_replies import KeptReplies
from deltaline_server.tables.ledger import Slots, StepLedger
from deltaline_server.tables.lines import NULL_LINE, LinePool
from deltaline_server.tables.moved import Owner
from deltaline_server.tables.open_tokens import Opened, OpenTokens, Origin
from deltaline_server.tables.pages import Lines
from deltaline_server.tables.sequence import GONE, SequenceDescription, SequenceState, SpanProgress, slots_of
from deltaline_server.tables.sequence_adapters import SequenceAdapters

CLOSING = bytes([SequenceState.CLOSING])


class SequenceTable:
    """Slots 0 .. num_slots - 1, one line each. All methods belong to one thread."""

    def __init__(
        self,
        *,
        lines: LinePool,
        ledger: StepLedger,
        replies: KeptReplies,
        adapters: SequenceAdapters,
        num_slots: int,
        default_lease_s: float,
        max_lease_s: float,
        lease_tick_s: float,
        clock: Callable[[], float],
    ) -> None:
        named = self._named = Handles(num_slots, clock)
        self.server_epoch, self.moved = named.server_epoch, named.moved
        self.lookup, self.owners = named.lookup, named.owners
        self._handle, self._state, self.principal = named.handle, named.state, named.principal
        self.ledger, self.replies, self.adapters = ledger, replies, adapters
        self.default_lease_s, self.max_lease_s = default_lease_s, max_lease_s
        self.num_slots, self.num_expired = num_slots, 0
        self.num_open_of: defaultdict[int, int] = defaultdict(int)
        """Open sequences by their principal's number."""
        self.principals: dict[int, Principal] = {}
        """By their numbers, those who have or had sequences."""
        self.is_draining = False
        """Whether no new sequence is opened any more."""
        self.lines, self.pages, self._clock, self._lease_tick_s = lines, lines.pages, clock, lease_tick_s
        self._last_reap_s = clock()
        self._free = list(range(num_slots))
        self.on_freed: Callable[[int], None] = lambda slot: None
        """Called with each slot whose sequence is over."""
        self.on_let_go: Callable[[int, Refusal], None] = lambda slot, refusal: None
        """Called to have the steps that wait for a slot's sequence refused."""
        self.tokens = OpenTokens(num_slots, self._is_any_held, self._check_held, clock)
        self._ends_as = np.zeros(num_slots, dtype=np.uint8)
        self._lease_s = np.zeros(num_slots)
        self._deadline_s = np.zeros(num_slots)
        # Lines that a batch reads and writes. A span that has not run yet reads the null line, the fresh-sequence flag,
        # or a frozen line, which its slot holds until then.
        self.read_line = np.zeros((ledger.num_spans, num_slots), dtype=np.int64)
        self.write_line = np.zeros(num_slots, dtype=np.int64)
        self.num_frozen_reads = 0
        """Spans of slots that read a frozen line."""
        self.captured: set[CapturedState] = set()
        """States that are held for whoever may go on from them."""
        # The half of the draft ring that holds the last verify's drafts; until there is one either will do.
        self.draft_half = np.zeros((ledger.num_spans, num_slots), dtype=np.int64)

    @property
    def num_open(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_lines_used(self) -> int:
        """Lines that sequences write, of `num_lines`; those of snapshots are beside them."""
        return self.num_open

    @property
    def num_lines(self) -> int:
        return self.num_slots

    # -- life ------------------------------------------------------------------------------------------------------

    def open(
        self,
        count: int,
        lease_s: float | None = None,
        token: bytes = b"",
        adapter: str = "",
        principal: Principal = ANONYMOUS,
    ) -> Opened:
        """Open `count` sequences of a principal with an adapter, by its name, or none: all of them or none.

        The same token within a minute returns the same handles. Raises RequestError NO_FREE_LINES, INVALID_REQUEST,
        ADAPTERS_OFF, ADAPTER_UNKNOWN or QUOTA_EXCEEDED, and DRAINING unless the token is known; SEQUENCE_CLOSED,
        SEQUENCE_EXPIRED or SEQUENCE_UNKNOWN when one of what the token opened is over.
        """
        lease_s = self.checked_lease(lease_s)
        make = partial(self._open, count, lease_s, adapter, principal)
        return self.tokens.once(principal, token, count, Origin(adapter), make)

    def _open(self, count: int, lease_s: float, adapter: str, principal: Principal) -> Opened:
        self.check_room(count, principal)
        bound = self.adapters.reserve(adapter, count, principal)
        try:
            lines = self.lines.allocate(count)
        except RequestError:
            self.adapters.give_back(bound, count)
            raise
        slots = self.begin(lines, lease_s, principal)
        self.adapters.put(slots, bound)
        return Opened(self.handles(slots), lease_s, bound)

    def check_room(self, count: int, principal: Principal) -> None:
        """Raise RequestError DRAINING, QUOTA_EXCEEDED or NO_FREE_LINES where no `count` more sequences may begin."""
        if self.is_draining:
            raise RequestError(Reason.DRAINING, "the server is draining")
        if principal.quotas is not None:
            principal.quotas.check("sequences", self.num_open_of[principal.number], count)
        if count > len(self._free):
            message = f"{count} sequences asked for, {len(self._free)} of {self.num_slots} lines are free"
            raise RequestError(Reason.NO_FREE_LINES, message, retry_after_s=1.0)

    def begin(self, lines: Lines, lease_s: float, principal: Principal) -> Slots:
        """Let as many sequences begin as there are lines, which they will write, in slots that are free; they read
        nothing and have no adapter so far. Returns their slots, int64 [len(lines)]."""
        slots = np.array([heapq.heappop(self._free) for _ in range(len(lines))], dtype=np.int64)
        self._named.begin(slots, principal)
        self.principals[principal.number] = principal
        self.num_open_of[principal.number] += len(lines)
        self._lease_s[slots] = lease_s
        self._deadline_s[slots] = self._clock() + lease_s
        self.write_line[slots] = lines
        self.read_line[:, slots] = NULL_LINE
        self.ledger.reset(slots)
        return slots

    def open_by_principal(self) -> list[tuple[Principal, NDArray[np.uint64]]]:
        """The handles of the sequences that are open, of each principal that has some; not of those without a lease,
        which are yet to come."""
        is_open = (self._state == SequenceState.OPEN) & np.isfinite(self._lease_s)
        numbers = np.unique(self.principal[is_open]).tolist()
        return [(self.principals[one], self._handle[is_open & (self.principal == one)]) for one in numbers]

    def handles(self, slots: Slots) -> NDArray[np.uint64]:
        """The handles of slots that are in use, uint64 [len(slots)]."""
        return self._handle[slots]

    def close(self, epoch: int, handles: NDArray[np.uint64], principal: Principal = ANONYMOUS) -> list[SequenceState]:
        """End sequences; those with steps in flight end when the steps are done. Idempotent."""
        slots, states = self.lookup(epoch, handles, principal)
        for i in np.flatnonzero((states == SequenceState.OPEN) | (states == SequenceState.POISONED)).tolist():
            states[i] = self._end(int(slots[i]), SequenceState.CLOSED)
        return [SequenceState(state) for state in states.tolist()]

    def renew(
        self,
        epoch: int,
        handles: NDArray[np.uint64],
        lease_s: float | None = None,
        principal: Principal = ANONYMOUS,
    ) -> list[SequenceState]:
        """Move lease deadlines to `lease_s` from now, or to the lease that the sequence was opened with."""
        if lease_s is not None:
            self.checked_lease(lease_s)
        slots, states = self.lookup(epoch, handles, principal)
        held = slots[(states == SequenceState.OPEN) | (states == SequenceState.POISONED)]
        self._deadline_s[held] = self._clock() + (self._lease_s[held] if lease_s is None else lease_s)
        return [SequenceState(state) for state in states.tolist()]

    def lease(self, slot: int, lease_s: float) -> None:
        """A slot's sequence, which had another lease so far, has this one from now on."""
        self._lease_s[slot], self._deadline_s[slot] = lease_s, self._clock() + lease_s

    def lease_s(self, slot: int) -> float:
        """How long the lease of a slot's sequence is, in all."""
        return max(float(self._lease_s[slot]), float(self._deadline_s[slot]) - self._clock())

    def touch(self, slots: Slots) -> None:
        """Renew the leases of slots whose steps were taken or are over; a later deadline stays."""
        deadline_s = self._lease_s.take(slots)
        deadline_s += self._clock()
        self._deadline_s[slots] = np.maximum(self._deadline_s.take(slots), deadline_s)

    def reap(self) -> int:
        """End sequences whose lease is over and that have no step in flight; returns how many.

        After a stall of the whole process (this call comes late) clients had no chance to renew: it waits for the next.
        """
        now, last_s = self._clock(), self._last_reap_s
        self._last_reap_s = now
        if now - last_s > 2 * self._lease_tick_s:
            return 0
        held = (self._state == SequenceState.OPEN) | (self._state == SequenceState.POISONED)
        over = np.flatnonzero(held & (self._deadline_s <= now))
        over = over[self.ledger.steps_in_flight(over) == 0]
        for slot in over.tolist():
            self._end(slot, SequenceState.EXPIRED)
        self.num_expired += len(over)
        return len(over)

    def let_go(self, slot: int, owner: Owner) -> None:
        """A slot's sequence, which is open and of which the device has nothing, lives at its owner from now on.

        The steps that wait for it are refused; its principal is told of the owner for as long as its lease was.
        """
        whose = self.principals[int(self.principal[slot])].name
        handle = int(self._handle[slot])
        self.moved.add(self.server_epoch, handle, whose, owner, self.lease_s(slot))
        if self._end(slot, SequenceState.ELSEWHERE) is SequenceState.CLOSING:
            self.moved.tell(self.server_epoch, handle, whose)
            self.on_let_go(slot, owner.refusal())

    def end_frozen_reads(self, span: int | slice, slots: Slots) -> None:
        """Let go of the frozen lines that slots read on a span, or on several; what they read then is theirs to say."""
        if not self.num_frozen_reads:
            return
        read = self.read_line[span, slots]
        frozen = read[(read != NULL_LINE) & (read != self.write_line[slots])]
        self.num_frozen_reads -= len(frozen)
        self.lines.release(frozen.tolist())

    def poison(self, slot: int) -> None:
        """The slot's state can't be trusted: it takes no more steps."""
        if self._state[slot] == SequenceState.OPEN:
            self._state[slot] = SequenceState.POISONED

    def settle(self, slots: Slots) -> None:
        """Steps of these slots are done or dropped: free those that are closing and have none left in flight."""
        states = self._state.take(slots)
        if CLOSING not in states.tobytes():
            return
        closing = slots[states == SequenceState.CLOSING]
        for slot in closing[self.ledger.steps_in_flight(closing) == 0].tolist():
            self._free_slot(slot, SequenceState(int(self._ends_as[slot])))

    def _end(self, slot: int, how: SequenceState) -> SequenceState:
        if self.ledger.steps_in_flight(np.array([slot]))[0]:
            self._state[slot], self._ends_as[slot] = SequenceState.CLOSING, how
            return SequenceState.CLOSING
        self._free_slot(slot, how)
        return how

    def _free_slot(self, slot: int, how: SequenceState) -> None:
        self.num_open_of[int(self.principal[slot])] -= 1
        self._named.end(slot, how)
        self.end_frozen_reads(slice(None), np.array([slot]))
        self.lines.release([int(self.write_line[slot])])
        self.write_line[slot] = NULL_LINE
        self.read_line[:, slot] = NULL_LINE
        self.replies.drop(slot)
        self.on_freed(slot)
        self.ledger.reset(np.array([slot]))
        self.adapters.end(slot)
        heapq.heappush(self._free, slot)

    def checked_lease(self, lease_s: float | None) -> float:
        """The lease that is asked for, or the default. Raises RequestError INVALID_REQUEST."""
        if lease_s is None:
            return self.default_lease_s
        if not 0 < lease_s <= self.max_lease_s:
            message = f"lease_ms: expected 1 .. {round(self.max_lease_s * 1000)}, got {round(lease_s * 1000)}"
            raise RequestError(Reason.INVALID_REQUEST, message, field="lease_ms")
        return lease_s

    # -- questions -------------------------------------------------------------------------------------------------

    def kept_bytes(self, principal: Principal) -> int:
        """Bytes of the replies that a principal's sequences have."""
        return self.replies.num_bytes(slice(None), self.principal == principal.number)

    def _check_held(self, opened: Opened, principal: Principal) -> None:
        """Raise RequestError unless every sequence of an open is held: whoever opened them has ended one since."""
        slots, states = self.lookup(self.server_epoch, opened.handles, principal)
        for slot, state in zip(slots.tolist(), states.tolist(), strict=True):
            if state not in (SequenceState.OPEN, SequenceState.POISONED):
                message = "open_token: a sequence that it opened is over; open others with a new token"
                raise RequestError(self.refusal(state, slot, 0).reason, message)

    def _is_any_held(self, handles: NDArray[np.uint64]) -> bool:
        return bool((self._handle[slots_of(handles)] == handles).any())

    def moved_refusals(
        self, epoch: int, handles: NDArray[np.uint64], states: NDArray[np.uint8], principal: Principal
    ) -> dict[int, Refusal]:
        """What is said of those of a lookup's handles that were moved, by their index, beyond `refusal`."""
        return {i: owner.refusal() for i, owner in self.owners(epoch, handles, states, principal).items()}

    def refusal(self, state: int, slot: int, span: int) -> Refusal:
        """Why a sequence in this state takes no step on this span."""
        if state == SequenceState.POISONED:
            return self.ledger.refusal(Reason.STATE_POISONED, span, slot)
        if state == SequenceState.CLOSING:
            state = int(self._ends_as[slot])
        reason, message = GONE[SequenceState(state)]
        return Refusal(reason, message)

    def describe(
        self, epoch: int, handles: NDArray[np.uint64], principal: Principal = ANONYMOUS
    ) -> list[SequenceDescription]:
        """What is held of each handle. Changes nothing."""
        now = self._clock()
        slots, states = self.lookup(epoch, handles, principal)
        return [
            self._description(int(slot), SequenceState(state), now)
            for slot, state in zip(slots.tolist(), states.tolist(), strict=True)
        ]

    def _description(self, slot: int, state: SequenceState, now: float) -> SequenceDescription:
        if state not in (SequenceState.OPEN, SequenceState.CLOSING, SequenceState.POISONED):
            return SequenceDescription(state)
        done, tail = self.ledger.done, self.ledger.tail
        return SequenceDescription(
            state,
            0.0 if state is SequenceState.CLOSING else max(0.0, float(self._deadline_s[slot]) - now),
            tuple(
                SpanProgress(
                    int(done.step[span, slot]),
                    int(done.position[span, slot]),
                    int(tail.step[span, slot] - done.step[span, slot]),
                    int(done.pending[span, slot]),
                )
                for span in range(self.ledger.num_spans)
            ),
            self.adapters.of(slot),
        )

    def commit(
        self,
        epoch: int,
        span: int,
        handles: NDArray[np.uint64],
        steps: NDArray[np.int64],
        accepted: NDArray[np.int32],
        principal: Principal = ANONYMOUS,
    ) -> tuple[NDArray[np.int64], dict[int, Refusal]]:
        """Fix accepted counts of verifies (named by their steps); returns positions int64 [N] and refusals by row."""
        slots, states = self.lookup(epoch, handles, principal)
        positions = np.zeros(len(handles), dtype=np.int64)
        refusals: dict[int, Refusal] = {}
        for i, (slot, state) in enumerate(zip(slots.tolist(), states.tolist(), strict=True)):
            if state == SequenceState.OPEN:
                refusal = self.ledger.commit(span, slot, int(steps[i]), int(accepted[i]))
            else:
                refusal = self.refusal(state, slot, span)
            if state in (SequenceState.OPEN, SequenceState.CLOSING, SequenceState.POISONED):
                positions[i] = self.ledger.done.position[span, slot]
            if refusal is not None:
                refusals[i] = refusal
        if refusals:
            refusals |= self.moved_refusals(epoch, handles, states, principal)
        self.touch(np.delete(slots, list(refusals)))
        return positions, refusals

    def check_integrity(self) -> None:
        """Raise ValueError unless slots, lines, handles, ledger and replies agree. Cheap enough for tests and idle
        time."""
        references = count_references(self.lines.num_lines, self.read_line, self.write_line, self.captured)
        self.lines.check_integrity(references, [(state.pages, state.position) for state in self.captured])
        self.ledger.check_integrity()
        free = np.zeros(self.num_slots, dtype=bool)
        free[self._free] = True
        if (free != (self._state == SequenceState.FREE)).any() or (free != (self._handle == 0)).any():
            raise ValueError("sequence table: free slots and states disagree")
        if (free != (self.write_line == NULL_LINE)).any():
            raise ValueError("sequence table: slots and lines disagree")
        used = self.write_line[~free]
        if len(np.unique(used)) != len(used):
            raise ValueError("sequence table: a line belongs to two slots")
        is_frozen_read = (self.read_line != NULL_LINE) & (self.read_line != self.write_line)
        if self.lines.is_written[self.read_line[is_frozen_read]].any() or not self.lines.is_written[used].all():
            raise ValueError("sequence table: a slot reads a line that another writes, or writes a frozen one")
        if int(is_frozen_read.sum()) != self.num_frozen_reads:
            raise ValueError("sequence table: the count of frozen lines that are read is wrong")
        counts = np.bincount(self.principal[~free], minlength=1)
        if any(count != counts[number : number + 1].sum() for number, count in self.num_open_of.items()):
            raise ValueError("sequence table: principals and their counts disagree")
        self.adapters.check_integrity(state.adapter for state in self.captured)
        if self.adapters.number[free].any():
            raise ValueError("sequence table: a free slot has an adapter")
