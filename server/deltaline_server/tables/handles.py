"""Handles: which sequence each names, whose it is and in what state; also of those that are over or were moved."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.moved import MovedSequences, Owner
from deltaline_server.tables.sequence import ANOTHER_SERVER, MAX_SLOTS, SequenceState, make_handles, slots_of


class Handles:
    """Of slots 0 .. num_slots - 1: arrays by slot, of which others write `state` alone.

    handle uint64, 0 for a free slot. state uint8 (SequenceState). principal int32: the number of whose sequence it is.
    """

    def __init__(self, num_slots: int, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        if not 1 <= num_slots <= MAX_SLOTS:
            raise ValueError(f"num_slots: expected 1 .. {MAX_SLOTS}, got {num_slots}")
        self.server_epoch = secrets.randbits(63) + 1
        self.handle = np.zeros(num_slots, dtype=np.uint64)
        self.state = np.zeros(num_slots, dtype=np.uint8)
        self.principal = np.zeros(num_slots, dtype=np.int32)
        self.moved = MovedSequences(clock)
        # The last sequence of each slot that ended here.
        self._former_handle = np.zeros(num_slots, dtype=np.uint64)
        self._former_principal = np.zeros(num_slots, dtype=np.int32)
        self._former_state = np.full(num_slots, SequenceState.UNKNOWN, dtype=np.uint8)

    def begin(self, slots: Slots, principal: Principal) -> None:
        """Free slots have sequences of a principal, with new handles."""
        self.handle[slots] = make_handles(slots)
        self.state[slots] = SequenceState.OPEN
        self.principal[slots] = principal.number

    def end(self, slot: int, how: SequenceState) -> None:
        """The sequence in a slot is over, the slot is free."""
        if how is not SequenceState.ELSEWHERE:  # of which `moved` knows
            self._former_handle[slot], self._former_state[slot] = self.handle[slot], how
            self._former_principal[slot] = self.principal[slot]
        self.handle[slot], self.state[slot] = 0, SequenceState.FREE

    def lookup(
        self, epoch: int, handles: NDArray[np.uint64], principal: Principal = ANONYMOUS
    ) -> tuple[Slots, NDArray[np.uint8]]:
        """Slots int64 [N] and states uint8 [N] (SequenceState) of handles. A slot means nothing when its sequence is
        gone; another principal's sequence is UNKNOWN. epoch: ANOTHER_SERVER where a call means one."""
        slots = slots_of(handles)
        if epoch != self.server_epoch:
            gone = SequenceState.ELSEWHERE if epoch == ANOTHER_SERVER else SequenceState.LOST
            return slots, self._with_moved(epoch, handles, np.full(len(handles), gone, dtype=np.uint8), principal)
        # Nearly always every handle is one that is held: its slot is in range and not free.
        near, states = self.handle.take(slots, mode="clip"), self.state.take(slots, mode="clip")
        is_own = self.principal.take(slots, mode="clip") == principal.number
        if near.tobytes() == handles.tobytes() and np.count_nonzero(states) == np.count_nonzero(is_own) == len(states):
            return slots, states
        in_range = slots < len(self.handle)
        slots = np.where(in_range, slots, 0)
        live = in_range & is_own & (handles != 0) & (self.handle[slots] == handles)
        former = in_range & (handles != 0) & (self._former_handle[slots] == handles)
        former &= self._former_principal[slots] == principal.number
        states = np.where(live, self.state[slots], np.where(former, self._former_state[slots], SequenceState.UNKNOWN))
        return slots, self._with_moved(epoch, handles, states.astype(np.uint8), principal)

    def _with_moved(
        self, epoch: int, handles: NDArray[np.uint64], states: NDArray[np.uint8], principal: Principal
    ) -> NDArray[np.uint8]:
        """States, those of which nothing is held here corrected where it is known that they live elsewhere."""
        if len(self.moved):
            for i in np.flatnonzero((states == SequenceState.UNKNOWN) | (states == SequenceState.LOST)).tolist():
                if self.moved.find(epoch, int(handles[i]), principal.name) is not None:
                    states[i] = SequenceState.ELSEWHERE
        return states

    def owners(
        self,
        epoch: int,
        handles: NDArray[np.uint64],
        states: NDArray[np.uint8] | Sequence[SequenceState],
        principal: Principal,
    ) -> dict[int, Owner]:
        """Where those of a principal's sequences live that were moved, by their index, for it to be told; states: of a
        lookup."""
        elsewhere = np.flatnonzero(np.asarray(states) == SequenceState.ELSEWHERE).tolist()
        found = {i: self.moved.tell(epoch, int(handles[i]), principal.name) for i in elsewhere}
        return {i: owner for i, owner in found.items() if owner is not None}
