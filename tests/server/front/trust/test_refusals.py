"""Who has many refused calls waits for the answers, in turns, and nobody else does."""

from __future__ import annotations

import pytest

from deltaline_server.front.trust.refusals import BURST, MAX_HOLD_S, PER_S, Refusals


class Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.refusals = Refusals(lambda: self.now_s)

    def holds_s(self, count: int, principal: str = "flood") -> list[float]:
        return [self.refusals.hold_s(principal) for _ in range(count)]


def test_a_burst_is_answered_at_once_and_more_in_turns() -> None:
    rig = Rig()
    assert rig.holds_s(BURST) == pytest.approx([0.0] * BURST, abs=1e-6)
    assert rig.holds_s(3) == pytest.approx([1 / PER_S, 2 / PER_S, 3 / PER_S])
    assert rig.holds_s(2, "other") == pytest.approx([0.0, 0.0], abs=1e-6)
    assert rig.holds_s(2, "") == pytest.approx([0.0, 0.0], abs=1e-6)


def test_who_waits_as_long_as_told_is_never_ahead_of_its_turns() -> None:
    rig = Rig()
    rig.holds_s(BURST)
    for _ in range(50):
        (hold_s,) = rig.holds_s(1)
        assert hold_s == pytest.approx(1 / PER_S)
        rig.now_s += hold_s


def test_what_was_spent_comes_back_and_not_more_than_a_burst() -> None:
    rig = Rig()
    rig.holds_s(BURST + 1)
    rig.now_s += 11 / PER_S
    assert [hold_s > 1e-6 for hold_s in rig.holds_s(11)] == [False] * 10 + [True]
    rig.now_s += 1e6
    assert [hold_s > 1e-6 for hold_s in rig.holds_s(BURST + 1)] == [False] * BURST + [True]


def test_no_answer_waits_longer_than_the_most() -> None:
    rig = Rig()
    holds_s = rig.holds_s(BURST + 2 * round(PER_S * MAX_HOLD_S))
    assert max(holds_s) == holds_s[-1] == pytest.approx(MAX_HOLD_S)
    rig.now_s += MAX_HOLD_S
    assert rig.holds_s(1) == pytest.approx([1 / PER_S]), "what was beyond it is forgotten"
