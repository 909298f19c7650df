"""The step ledger: how far each cell (span, slot) is, and the rules by which a step is taken, applied or refused.

Each cell is kept twice: `done` is what the state on the device has, `tail` is what it will have once every admitted
step is done. A new step is judged by the tail; when an admitted step is dropped, the tail falls back to what is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, Refusal
from deltaline_server.step import RowKind, StepRequest
from deltaline_server.tables.progress import Progress, WholeProgress

NO_COMMIT = -1

Slots = NDArray[np.int64]

# Commits that one span may be ahead of another's: each is remembered until every span has passed it.
MAX_FIXED_COMMITS = 16384
RETRY_AFTER_S = {Reason.TOO_MANY_IN_FLIGHT: 0.01, Reason.PAGES_EXHAUSTED: 0.05}


@dataclass(slots=True, eq=False)
class Admission:
    """Rows of a request that were taken, in row order: what each does once it runs.

    rows: index into the request. after: the progress of their slots on the span once the rows are done, int64 [5, rows]
    as in Progress: the numbers of their steps and their positions come first.
    commit: accepted count that the row fixes, NO_COMMIT for none; has_commits: whether any may. num_replayed: drafts
    that it folds into the state first; has_replays: whether there are any. is_idle: whether no row's cell has a step in
    flight. Nothing of it changes; it is not frozen because every step makes one.
    """

    rows: NDArray[np.int64]
    slots: Slots
    after: NDArray[np.int64]
    has_commits: bool
    commit: NDArray[np.int64]
    commit_position: NDArray[np.int64]
    commit_ordinal: NDArray[np.int64]
    num_replayed: NDArray[np.int64]
    has_replays: bool
    is_idle: bool

    def only(self, index: NDArray[np.int64]) -> Admission:
        """These rows (positions in the admission) alone. The flags may speak of rows that are left out."""
        return replace(
            self,
            rows=self.rows[index],
            slots=self.slots[index],
            after=self.after[:, index],
            commit=self.commit[index],
            commit_position=self.commit_position[index],
            commit_ordinal=self.commit_ordinal[index],
            num_replayed=self.num_replayed[index],
        )


@dataclass(frozen=True, eq=False)
class CommittedProgress:
    """How far a slot is on all spans when nothing is pending and they are at one position.

    replay, zero_commits int64 [spans], as in Progress. fixed: counts that one span has fixed and another has yet to
    come to, by position and ordinal.
    """

    position: int
    replay: NDArray[np.int64]
    zero_commits: NDArray[np.int64]
    fixed: Mapping[tuple[int, int], int]


class StepLedger:
    """The progress of every cell. Slots are the caller's: it only asks about slots in use."""

    def __init__(self, num_spans: int, num_slots: int, max_in_flight: int) -> None:
        self.num_spans = num_spans
        self.max_in_flight = max_in_flight
        self.done = Progress(num_spans, num_slots)
        self.tail = Progress(num_spans, num_slots)
        self._committed_step = np.zeros((num_spans, num_slots), dtype=np.int64)
        self._committed_accepted = np.zeros((num_spans, num_slots), dtype=np.int64)
        self._fixed: dict[int, dict[tuple[int, int], int]] = {}
        # What admissions without commits share; no request has more live rows than there are slots.
        self._every_row, self._zeros = np.arange(num_slots), np.zeros(num_slots, dtype=np.int64)
        self._no_commits = np.full(num_slots, NO_COMMIT, dtype=np.int64)
        for shared in (self._every_row, self._zeros, self._no_commits):
            shared.flags.writeable = False

    def reset(self, slots: Slots) -> None:
        """Slots begin anew: step 0, position 0, nothing pending, on every span."""
        for progress in (self.done, self.tail):
            progress.values[:, :, slots] = 0
        self._committed_step[:, slots] = 0
        self._committed_accepted[:, slots] = 0
        if self._fixed:
            for slot in slots.tolist():
                self._fixed.pop(slot, None)

    def steps_in_flight(self, slots: Slots) -> NDArray[np.int64]:
        """Admitted steps that are not done, over all spans, int64 [len(slots)]."""
        in_flight: NDArray[np.int64] = (self.tail.step[:, slots] - self.done.step[:, slots]).sum(axis=0)
        return in_flight

    # -- capturing -------------------------------------------------------------------------------------------------

    def captured(self, slot: int) -> CommittedProgress | Refusal:
        """How far the steps that are done have brought a slot; or why a state of it means nothing: VERIFY_PENDING or
        SPANS_UNEVEN."""
        done = self.done
        pending = np.flatnonzero(done.pending[:, slot])
        if len(pending):
            span = int(pending[0])
            text = f"a verify of {done.pending[span, slot]} tokens waits for its accepted count"
            return replace(self.refusal(Reason.VERIFY_PENDING, span, slot), message=text)
        positions = done.position[:, slot]
        if (positions != positions[0]).any():
            return self.refusal(Reason.SPANS_UNEVEN, 0, slot)
        fixed = dict(self._fixed.get(slot, {}))
        return CommittedProgress(
            int(positions[0]), done.replay[:, slot].copy(), done.zero_commits[:, slot].copy(), fixed
        )

    def restore(self, slots: Slots, captured: CommittedProgress) -> None:
        """Slots that began anew begin where another was: no step is done, nothing is pending."""
        for progress in (self.done, self.tail):
            progress.position[:, slots] = captured.position
            progress.replay[:, slots] = captured.replay[:, None]
            progress.zero_commits[:, slots] = captured.zero_commits[:, None]
        if captured.fixed:
            self._fixed |= {slot: dict(captured.fixed) for slot in slots.tolist()}

    def whole(self, slot: int) -> WholeProgress:
        """All that is known of a slot of which nothing is in flight: copies."""
        committed = np.stack((self._committed_step[:, slot], self._committed_accepted[:, slot]))
        return WholeProgress(self.done.values[:, :, slot].copy(), committed, dict(self._fixed.get(slot, {})))

    def go_on(self, slot: int, whole: WholeProgress) -> None:
        """A slot that began anew goes on where another was, whatever waits there."""
        for progress in (self.done, self.tail):
            progress.values[:, :, slot] = whole.values
        self._committed_step[:, slot], self._committed_accepted[:, slot] = whole.committed
        if whole.fixed:
            self._fixed[slot] = dict(whole.fixed)

    # -- taking steps ----------------------------------------------------------------------------------------------

    def admit_plain(self, request: StepRequest, slots: Slots) -> Admission | None:
        """Judge a whole request in few operations, if every row is plain; None says nothing, see `admit`.

        Plain rows are prefills and decodes, the next steps of cells that no verify has been at lately, at the cells'
        positions, without commits and within the limit in flight. `admit` admits the same rows with the same values.
        """
        form, num_rows = request.form, len(slots)
        if form.num_of_kind[RowKind.VERIFY] or form.has_commits:
            return None
        # Bytes compare at a fraction of what numpy's reductions cost.
        after = self.tail.values[:, form.span].take(slots, axis=1)
        last_step, position = after[0].tobytes(), after[1].tobytes()
        after[0] += 1
        if after[0].tobytes() != request.step.tobytes() or position != request.position.tobytes():
            return None
        done_step = self.done.step[form.span].take(slots)
        is_idle = done_step.tobytes() == last_step
        if not is_idle and (after[0] - done_step).max() > self.max_in_flight:
            return None
        if np.count_nonzero(after[2:]):
            return None
        after[1] += form.lengths
        return Admission(
            rows=self._every_row[:num_rows],
            slots=slots,
            after=after,
            has_commits=False,
            commit=self._no_commits[:num_rows],
            commit_position=self._zeros[:num_rows],
            commit_ordinal=self._zeros[:num_rows],
            num_replayed=self._zeros[:num_rows],
            has_replays=False,
            is_idle=is_idle,
        )

    def admit(
        self, request: StepRequest, rows: NDArray[np.int64], slots: Slots, lengths: NDArray[np.int64]
    ) -> tuple[Admission, dict[int, Refusal]]:
        """Judge new steps (each the next of its cell) without taking them.

        rows: the request's rows to judge, their slots and lengths beside them. Returns what could be taken, and the
        refusals of the others by row index.
        """
        form = request.form
        span = form.span
        last_step, position, pending, replay, zero_commits = self.tail.values[:, span, slots]
        accepted = form.accepted[rows].astype(np.int64)
        has_commit, is_pending = accepted != NO_COMMIT, pending > 0
        commits = has_commit & is_pending
        commit = np.where(commits, accepted, NO_COMMIT)
        after_commit = position + np.where(commits, accepted, 0)
        faults = [(request.position[rows] != after_commit, Reason.POSITION_MISMATCH)]
        if has_commit.any() or is_pending.any():
            again = has_commit & ~is_pending & (self._committed_step[span, slots] == last_step) & (last_step > 0)
            fixed = self._fixed_elsewhere(slots, position, zero_commits, commits)
            fixed = np.where(again, self._committed_accepted[span, slots], fixed)
            faults += [
                ((fixed != NO_COMMIT) & (fixed != accepted), Reason.COMMIT_CONFLICT),
                (has_commit & ~is_pending & ~again, Reason.NOTHING_TO_COMMIT),
                (~has_commit & is_pending, Reason.VERIFY_PENDING),
                ((accepted < NO_COMMIT) | (is_pending & (accepted > pending)), Reason.ACCEPTED_OUT_OF_RANGE),
            ]
        in_flight = last_step - self.done.step[span, slots]
        faults.append((in_flight >= self.max_in_flight, Reason.TOO_MANY_IN_FLIGHT))
        reason = np.zeros(len(rows), dtype=np.int64)
        for number, (fault, _) in enumerate(faults, start=1):  # the last one wins: the most basic fault is reported
            np.putmask(reason, fault, number)
        refusals = {
            int(rows[i]): self.refusal(faults[reason[i] - 1][1], span, int(slots[i]), accepted=int(accepted[i]))
            for i in np.flatnonzero(reason)
        }
        is_verify = form.kind[rows] == RowKind.VERIFY
        ordinal = np.where(commits, np.where(accepted == 0, zero_commits + 1, 0), zero_commits)
        taken = np.flatnonzero(reason == 0)
        after = np.zeros((5, len(rows)), dtype=np.int64)
        after[0] = request.step[rows]
        after[1] = after_commit + np.where(is_verify, 0, lengths)
        after[2] = np.where(is_verify, lengths, 0)
        after[4] = np.where(is_verify, ordinal, 0)
        num_replayed = np.where(commits, accepted, replay)[taken]
        admission = Admission(
            rows=rows[taken],
            slots=slots[taken],
            after=after[:, taken],
            has_commits=bool(commits.any()),
            commit=commit[taken],
            commit_position=position[taken],
            commit_ordinal=zero_commits[taken],
            num_replayed=num_replayed,
            has_replays=bool(num_replayed.any()),
            is_idle=not in_flight[taken].any(),
        )
        return admission, refusals

    def take(self, span: int, admission: Admission, index: NDArray[np.int64] | slice = slice(None)) -> None:
        """Rows are admitted, or are what is left at the end of their cells' queues: the tails are as after them."""
        self.tail.values[:, span, admission.slots[index]] = admission.after[:, index]

    def begin(self, span: int, admission: Admission, index: NDArray[np.int64]) -> dict[int, Refusal]:
        """Rows are about to run for the first time: fix the commits that they carry.

        index: positions in the admission. Returns refusals by position in the admission, of rows whose commit was fixed
        to another value by another span since they were admitted; those must not run.
        """
        refusals: dict[int, Refusal] = {}
        if not admission.has_commits:
            return refusals
        committing = index[admission.commit[index] != NO_COMMIT]
        if self.num_spans > 1:
            for i in committing.tolist():
                slot, accepted = int(admission.slots[i]), int(admission.commit[i])
                refusal = self._fix(
                    span, slot, (int(admission.commit_position[i]), int(admission.commit_ordinal[i])), accepted
                )
                if refusal is not None:
                    refusals[i] = refusal
            committing = np.array([i for i in committing.tolist() if i not in refusals], dtype=np.int64)
        slots = admission.slots[committing]
        self._committed_step[span, slots] = admission.after[0, committing] - 1
        self._committed_accepted[span, slots] = admission.commit[committing]
        return refusals

    def finish(self, span: int, admission: Admission, index: NDArray[np.int64]) -> None:
        """Rows are done: their cells' state is what the admission says. index: positions in the admission."""
        if len(index) == len(admission.rows):
            self.done.values[:, span, admission.slots] = admission.after
        else:
            self.done.values[:, span, admission.slots[index]] = admission.after[:, index]

    def fall_back(self, span: int, slot: int) -> None:
        """All admitted steps of the cell that were not done were dropped: the tail is what is done."""
        self.tail.values[:, span, slot] = self.done.values[:, span, slot]

    # -- commits ---------------------------------------------------------------------------------------------------

    def commit(self, span: int, slot: int, step: int, accepted: int) -> Refusal | None:
        """Fix the accepted count of the verify that was step `step` of the cell. Returns the refusal, None when fixed.

        The same call again is fixed again, for as long as that verify is the last one that was committed.
        """
        done, tail = self.done, self.tail
        pending = int(done.pending[span, slot])
        if pending and done.step[span, slot] == step == tail.step[span, slot]:
            if not 0 <= accepted <= pending:
                return self.refusal(Reason.ACCEPTED_OUT_OF_RANGE, span, slot, accepted=accepted)
            key = (int(done.position[span, slot]), int(done.zero_commits[span, slot]))
            refusal = self._fix(span, slot, key, accepted) if self.num_spans > 1 else None
            if refusal is not None:
                return refusal
            self._committed_step[span, slot] = step
            self._committed_accepted[span, slot] = accepted
            for progress in (done, tail):
                progress.position[span, slot] += accepted
                progress.pending[span, slot] = 0
                progress.replay[span, slot] = accepted
                progress.zero_commits[span, slot] = 0 if accepted else key[1] + 1
            return None
        if step > 0 and self._committed_step[span, slot] == step:
            if self._committed_accepted[span, slot] == accepted:
                return None
            return self.refusal(Reason.COMMIT_CONFLICT, span, slot, accepted=accepted)
        return self.refusal(Reason.NOTHING_TO_COMMIT, span, slot, accepted=accepted)

    def _fixed_elsewhere(
        self, slots: Slots, position: NDArray[np.int64], ordinal: NDArray[np.int64], commits: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Counts that other spans have fixed for the verifies at these positions, NO_COMMIT where none has."""
        fixed = np.full(len(slots), NO_COMMIT, dtype=np.int64)
        if self.num_spans > 1:
            for i in np.flatnonzero(commits).tolist():
                counts = self._fixed.get(int(slots[i]), {})
                fixed[i] = counts.get((int(position[i]), int(ordinal[i])), NO_COMMIT)
        return fixed

    def _fix(self, span: int, slot: int, key: tuple[int, int], accepted: int) -> Refusal | None:
        counts = self._fixed.setdefault(slot, {})
        if counts.setdefault(key, accepted) != accepted:
            return self.refusal(Reason.COMMIT_CONFLICT, span, slot, accepted=accepted)
        is_over = len(counts) > MAX_FIXED_COMMITS
        if is_over or (len(counts) >= 64 and len(counts).bit_count() == 1):  # now and then, yet in good time
            done = self.done
            passed = min(zip(done.position[:, slot].tolist(), done.zero_commits[:, slot].tolist(), strict=True))
            for old in [k for k in counts if k < passed]:
                del counts[old]
            if len(counts) > MAX_FIXED_COMMITS:
                del counts[key]
                return self.refusal(Reason.SPAN_TOO_FAR_AHEAD, span, slot)
        return None

    # -- words -----------------------------------------------------------------------------------------------------

    def refusal(self, reason: Reason, span: int, slot: int, accepted: int = NO_COMMIT) -> Refusal:
        """A refusal that carries the cell's current values."""
        step, position = int(self.done.step[span, slot]), int(self.done.position[span, slot])
        pending, in_flight = int(self.tail.pending[span, slot]), int(self.tail.step[span, slot]) - step
        expected = int(self.tail.position[span, slot])
        messages = {
            Reason.STEP_STALE: f"the last step done is {step}; earlier ones are not kept",
            Reason.STEP_GAP: f"the next step is {step + in_flight + 1}",
            Reason.STEP_CONFLICT: "a step of this number was taken with other content",
            Reason.TOO_MANY_IN_FLIGHT: f"{in_flight} steps are in flight, the limit is {self.max_in_flight}",
            Reason.PAGES_EXHAUSTED: "too few pages of keys and values are free for the step",
            Reason.CONTEXT_EXCEEDED: "the sequence would have more tokens than max_context",
            Reason.POSITION_MISMATCH: f"the position before this step's commit is {expected}; "
            "a step's position is counted after the commit that it carries",
            Reason.VERIFY_PENDING: f"a verify of {pending} tokens waits for its accepted count",
            Reason.SPANS_UNEVEN: f"the spans are at the positions {self.done.position[:, slot].tolist()}",
            Reason.ACCEPTED_OUT_OF_RANGE: f"accepted: expected 0 .. {pending}, -1 when none is pending, got {accepted}",
            Reason.NOTHING_TO_COMMIT: "accepted: no verify of that step is done and pending",
            Reason.COMMIT_CONFLICT: "accepted: another count was fixed for this verify before",
            Reason.SPAN_TOO_FAR_AHEAD: f"this span is more than {MAX_FIXED_COMMITS} commits ahead of another",
            Reason.PREDECESSOR_REFUSED: "a step before this one was refused, so this one was not run",
            Reason.QUEUE_DEADLINE: "the queue deadline passed before the first chunk began",
            Reason.STATE_POISONED: "a computation failed or gave a value that is not finite; start a new sequence",
            Reason.STOPPING: "the server is stopping",
            Reason.NON_FINITE_INPUT: "hidden: the row has a value that is not finite",
        }
        return Refusal(
            reason,
            messages[reason],
            {"step": str(step), "position": str(position), "pending_tokens": str(pending)},
            retry_after_s=RETRY_AFTER_S.get(reason),
        )

    def check_integrity(self) -> None:
        """Raise ValueError unless every tail is at or ahead of what is done, within the limit of steps in flight."""
        in_flight = self.tail.step - self.done.step
        if (in_flight < 0).any() or (in_flight > self.max_in_flight).any():
            raise ValueError("step ledger: steps in flight out of range")
        if (self.tail.values != self.done.values)[:, in_flight == 0].any():
            raise ValueError("step ledger: an idle cell's tail differs from what is done")
