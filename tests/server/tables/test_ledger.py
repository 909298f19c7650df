"""The ledger's short way for plain rows admits what its long way admits, and nothing else; commits of their own."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaline_server.errors import Reason
from deltaline_server.step import OutputRows, RowKind, SpanShapes, StepForm, StepRequest
from deltaline_server.tables.ledger import Admission, StepLedger

NUM_SLOTS, MAX_IN_FLIGHT = 6, 2


def make_request(kinds: list[int], steps: list[int], positions: list[int], accepted: list[int]) -> StepRequest:
    """Rows of 1 token, a prefill's of 3."""
    lengths = [3 if kind == RowKind.PREFILL else 1 for kind in kinds]
    form = StepForm(
        server_epoch=1,
        span=1,
        handle=np.zeros(len(kinds), np.uint64),
        kind=np.array(kinds, np.uint8),
        accepted=np.array(accepted, np.int32),
        query_start_loc=np.cumsum([0, *lengths]),
        output=OutputRows.ALL,
        priority=0,
        shapes=SpanShapes(4, 4),
    )
    hidden = np.zeros((sum(lengths), 4), np.float32)
    return StepRequest(form, np.array(steps, np.int64), np.array(positions, np.int64), hidden)


def judge_both(ledger: StepLedger, request: StepRequest, slots: list[int]) -> Admission | None:
    """Judge a request both ways; whatever the short way admits, the long way admits with the same values."""
    at = np.array(slots)
    plain = ledger.admit_plain(request, at)
    is_next = request.step == ledger.tail.step[request.form.span, at] + 1
    if plain is not None:
        assert is_next.all()
        admission, refusals = ledger.admit(request, np.arange(len(at)), at, request.form.lengths)
        assert not refusals
        # What names a commit counts only where there is one.
        for name in {field.name for field in fields(Admission)} - {"commit_position", "commit_ordinal"}:
            np.testing.assert_array_equal(getattr(plain, name), getattr(admission, name), name)
    return plain


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_short_way_admits_as_the_long_way(data: st.DataObject) -> None:
    ledger = StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT)
    nudge = st.sampled_from([0] * 12 + [1, -1])
    for _ in range(data.draw(st.integers(1, 6))):
        slots = data.draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=4, unique=True))
        kind = st.sampled_from(data.draw(st.sampled_from([[1], [2], [1, 2], [1, 2, 3]])))
        kinds = [data.draw(kind) for _ in slots]
        accepted = [data.draw(st.sampled_from([-1] * 12 + [0, 1])) for _ in slots]
        steps = [int(ledger.tail.step[1, slot]) + 1 + data.draw(nudge) for slot in slots]
        positions = [int(ledger.tail.position[1, slot]) + data.draw(nudge) for slot in slots]
        request = make_request(kinds, steps, positions, accepted)
        admission = judge_both(ledger, request, slots)
        if admission is None and all(s == ledger.tail.step[1, slot] + 1 for s, slot in zip(steps, slots, strict=True)):
            at = np.array(slots)
            admission, _ = ledger.admit(request, np.arange(len(at)), at, request.form.lengths)
        if admission is not None and len(admission.rows):
            ledger.take(1, admission)
            if data.draw(st.booleans()):
                ledger.begin(1, admission, np.arange(len(admission.rows)))
                ledger.finish(1, admission, np.arange(len(admission.rows)))
                ledger.check_integrity()


def test_plain_rows_go_the_short_way() -> None:
    ledger = StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT)
    for step in (1, 2):
        request = make_request([1, 1], [step] * 2, [3 * (step - 1)] * 2, [-1] * 2)
        admission = judge_both(ledger, request, [4, 2])
        assert admission is not None
        ledger.take(1, admission)
    assert ledger.tail.position[1].tolist() == [0, 0, 6, 0, 6, 0]


@pytest.mark.parametrize(
    ("kinds", "steps", "positions", "accepted"),
    [
        pytest.param([2, 3], [2, 2], [1, 1], [-1, -1], id="verify"),
        pytest.param([2, 2], [2, 2], [1, 1], [-1, 0], id="commit"),
        pytest.param([2, 2], [2, 3], [1, 1], [-1, -1], id="gap"),
        pytest.param([2, 2], [2, 1], [1, 0], [-1, -1], id="again"),
        pytest.param([2, 2], [2, 2], [1, 2], [-1, -1], id="position"),
    ],
)
def test_other_rows_do_not(kinds: list[int], steps: list[int], positions: list[int], accepted: list[int]) -> None:
    ledger = StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT)
    first = judge_both(ledger, make_request([2, 2], [1, 1], [0, 0], [-1, -1]), [0, 1])
    assert first is not None
    ledger.take(1, first)
    assert judge_both(ledger, make_request(kinds, steps, positions, accepted), [0, 1]) is None


def test_no_more_steps_than_the_limit_are_in_flight() -> None:
    ledger = StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT)
    for step in range(1, MAX_IN_FLIGHT + 1):
        admission = judge_both(ledger, make_request([2], [step], [step - 1], [-1]), [3])
        assert admission is not None
        ledger.take(1, admission)
        last = admission
    request = make_request([2], [MAX_IN_FLIGHT + 1], [MAX_IN_FLIGHT], [-1])
    assert judge_both(ledger, request, [3]) is None
    ledger.finish(1, last, np.arange(1))
    assert judge_both(ledger, request, [3]) is not None


@pytest.mark.parametrize("accepted", range(-1, 6))
def test_a_commit_of_its_own_accepts_none_to_all_of_a_verify(accepted: int) -> None:
    ledger, slot = StepLedger(1, NUM_SLOTS, MAX_IN_FLIGHT), 3
    for progress in (ledger.done, ledger.tail):
        progress.values[:3, 0, slot] = 2, 10, 4  # step 2 at position 10 is a verify of 4 tokens
    refusal = ledger.commit(0, slot, 2, accepted)
    is_taken = 0 <= accepted <= 4
    assert (refusal is None) == is_taken
    assert refusal is None or refusal.reason is Reason.ACCEPTED_OUT_OF_RANGE
    expected = [2, 10 + accepted, 0, accepted] if is_taken else [2, 10, 4, 0]
    assert ledger.done.values[:4, 0, slot].tolist() == ledger.tail.values[:4, 0, slot].tolist() == expected


def test_a_commit_of_its_own_binds_the_other_spans_at_that_position() -> None:
    ledger, slot = StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT), 3
    for progress in (ledger.done, ledger.tail):
        progress.values[:3, :, slot] = np.array([[2, 2], [10, 10], [4, 4]])
    assert ledger.commit(0, slot, 2, 1) is None
    for accepted, expected in ((2, Reason.COMMIT_CONFLICT), (0, Reason.COMMIT_CONFLICT), (1, None)):
        refusal = ledger.commit(1, slot, 2, accepted)
        assert (refusal and refusal.reason) == expected
    assert ledger.done.position[:, slot].tolist() == [11, 11]


def test_of_rows_that_begin_those_whose_commit_another_span_has_fixed_otherwise_are_refused() -> None:
    ledger, slots = StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT), np.array([3, 1, 4])
    for progress in (ledger.done, ledger.tail):
        progress.values[:3, :, slots] = np.array([2, 10, 4])[:, None, None]
    request = make_request([RowKind.DECODE] * 3, [3] * 3, [11, 12, 13], [1, 2, 3])
    admission, refusals = ledger.admit(request, np.arange(3), slots, request.form.lengths)
    assert not refusals
    assert ledger.commit(0, 1, 2, 4) is None  # another span is faster
    conflicts = ledger.begin(1, admission, np.arange(3))
    assert {row: refusal.reason for row, refusal in conflicts.items()} == {1: Reason.COMMIT_CONFLICT}
    # What began is fixed, by the same call again and for the other span; what was refused is not.
    assert ledger.commit(1, 3, 2, 1) is None and ledger.commit(0, 4, 2, 3) is None
    refusal = ledger.commit(0, 3, 2, 2)
    assert refusal is not None and refusal.reason is Reason.COMMIT_CONFLICT
    assert ledger.commit(1, 1, 2, 4) is None


@pytest.mark.parametrize(("accepted", "expected"), [(3, {}), (2, {0: Reason.COMMIT_CONFLICT})])
def test_a_commit_of_its_own_may_ride_on_the_next_step_again(accepted: int, expected: dict[int, Reason]) -> None:
    ledger, slot = StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT), 3
    for progress in (ledger.done, ledger.tail):
        progress.values[:3, 1, slot] = 2, 10, 4
    assert ledger.commit(1, slot, 2, 3) is None
    request = make_request([RowKind.DECODE], [3], [13], [accepted])
    _, refusals = ledger.admit(request, np.arange(1), np.array([slot]), request.form.lengths)
    assert {row: refusal.reason for row, refusal in refusals.items()} == expected


def test_a_first_step_has_nothing_to_commit() -> None:
    ledger, request = StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT), make_request([RowKind.DECODE], [1], [0], [0])
    _, refusals = ledger.admit(request, np.arange(1), np.array([3]), request.form.lengths)
    assert refusals[0].reason is Reason.NOTHING_TO_COMMIT


@pytest.mark.parametrize(("step", "num_behind"), [(1, 0), (3, 0), (2, 1)], ids=["before", "after", "one is behind"])
def test_a_commit_of_its_own_names_the_verify_that_is_the_last_step(step: int, num_behind: int) -> None:
    ledger, slot = StepLedger(1, NUM_SLOTS, MAX_IN_FLIGHT), 3
    for progress in (ledger.done, ledger.tail):
        progress.values[:3, 0, slot] = 2, 10, 4
    ledger.tail.step[0, slot] += num_behind
    refusal = ledger.commit(0, slot, step, 1)
    assert refusal is not None and refusal.reason is Reason.NOTHING_TO_COMMIT
    assert ledger.done.values[:3, 0, slot].tolist() == [2, 10, 4]


def test_a_commit_of_its_own_again_is_the_same_commit() -> None:
    ledger, slot = StepLedger(1, NUM_SLOTS, MAX_IN_FLIGHT), 3
    for progress in (ledger.done, ledger.tail):
        progress.values[:3, 0, slot] = 2, 10, 4
    for accepted, expected in ((1, None), (1, None), (2, Reason.COMMIT_CONFLICT)):
        refusal = ledger.commit(0, slot, 2, accepted)
        assert (refusal and refusal.reason) == expected
    assert ledger.done.values[:4, 0, slot].tolist() == [2, 11, 0, 1]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_slot_that_is_read_out_goes_on_elsewhere_by_the_same_rules(data: st.DataObject) -> None:
    """Whatever comes, both ledgers admit and refuse it alike, and end alike."""
    first, second = StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT), StepLedger(2, NUM_SLOTS, MAX_IN_FLIGHT)
    slots = {first: 2, second: 4}
    ledgers = [first]
    num_before = data.draw(st.integers(0, 12))
    for number in range(num_before + 8):
        if number == num_before:
            second.go_on(4, first.whole(2))
            ledgers.append(second)
        span, kind = data.draw(st.integers(0, 1)), data.draw(st.sampled_from([1, 2, 3, 3, 3]))
        accepted, commits = data.draw(st.integers(-1, 2)), data.draw(st.booleans())
        step = int(first.done.step[span, 2]) + (not commits)
        position = int(first.done.position[span, 2]) + (accepted if accepted > 0 else 0)
        told = []
        for ledger in ledgers:
            at = np.array([slots[ledger]])
            if commits:
                refusal = ledger.commit(span, int(at[0]), step, accepted)
                told.append([refusal])
                continue
            request = make_request([kind], [step], [position], [accepted])
            request = replace(request, form=replace(request.form, span=span))
            admission, refusals = ledger.admit(request, np.arange(1), at, request.form.lengths)
            ledger.take(span, admission)
            refusals |= ledger.begin(span, admission, np.arange(len(admission.rows)))
            if not refusals:
                ledger.finish(span, admission, np.arange(len(admission.rows)))
            ledger.fall_back(span, int(at[0]))
            told.append(list(refusals.values()))
        assert told[0] == told[-1]
        for ledger in ledgers:
            ledger.check_integrity()
    first_whole, second_whole = first.whole(2), second.whole(4)
    np.testing.assert_array_equal(first_whole.values, second_whole.values)
    np.testing.assert_array_equal(first_whole.committed, second_whole.committed)
    assert first_whole.fixed == second_whole.fixed
