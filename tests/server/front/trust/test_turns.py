"""Of several principals that call each has its share, and who calls alone waits for nothing."""

from __future__ import annotations

import pytest

from deltaline_server.front.trust.turns import ACTIVE_S, CALL_S, OPEN_S, Turns


class Rig:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.turns = Turns(lambda: self.now_s)

    def waits_s(self, count: int, principal: int | None) -> list[float]:
        return [self.turns.wait_s(principal) for _ in range(count)]


def test_who_calls_alone_waits_for_nothing() -> None:
    rig = Rig()
    assert rig.waits_s(1000, principal=1) == [0.0] * 1000


def test_of_two_each_begins_a_call_in_the_time_of_two() -> None:
    rig = Rig()
    rig.waits_s(100, principal=1)
    assert rig.waits_s(3, principal=2) == pytest.approx([0.0, 2 * CALL_S, 4 * CALL_S])
    assert rig.waits_s(3, principal=1) == pytest.approx([0.0, 2 * CALL_S, 4 * CALL_S]), "another's calls are not before"
    assert rig.waits_s(2, principal=3) == pytest.approx([0.0, 3 * CALL_S])


def test_calls_that_anybody_may_make_have_turns_and_let_nobody_wait() -> None:
    rig = Rig()
    assert rig.waits_s(1000, principal=None) == [0.0] * 1000
    assert rig.waits_s(1000, principal=1) == [0.0] * 1000
    assert rig.waits_s(3, principal=None) == pytest.approx([0.0, 2 * CALL_S, 4 * CALL_S])
    assert rig.waits_s(1000, principal=1) == [0.0] * 1000


def test_no_call_that_anybody_may_make_waits_for_long() -> None:
    rig = Rig()
    rig.waits_s(1, principal=1)
    assert max(rig.waits_s(10_000, principal=None)) == pytest.approx(OPEN_S)


def test_one_call_at_a_time_waits_for_nothing_beside_a_flood() -> None:
    rig = Rig()
    for _ in range(200):
        rig.waits_s(10, principal=1)
        assert rig.waits_s(1, principal=2) == [0.0]
        rig.now_s += 2 * CALL_S


def test_who_has_called_counts_for_a_while() -> None:
    rig = Rig()
    rig.waits_s(1, principal=2)
    rig.now_s += 0.9 * ACTIVE_S
    assert rig.waits_s(2, principal=1)[1] > 0
    rig.now_s += 0.2 * ACTIVE_S
    assert rig.waits_s(100, principal=1) == [0.0] * 100, "the other is forgotten, and so are turns beside it"


def test_no_call_overtakes_those_that_began_to_wait_beside_another() -> None:
    rig = Rig()
    rig.waits_s(1, principal=2)
    begin_s = [rig.now_s + wait_s for wait_s in rig.waits_s(400, principal=1)]
    rig.now_s += 1.2 * ACTIVE_S
    assert rig.now_s < begin_s[-1], "the test is of calls that still wait when the other is forgotten"
    after_s = [rig.now_s + wait_s for wait_s in rig.waits_s(3, principal=1)]
    assert after_s[0] > begin_s[-1] and len(set(after_s)) == 1


def test_the_last_call_of_each_counts() -> None:
    rig = Rig()
    rig.waits_s(1, principal=2)
    rig.waits_s(1, principal=3)
    rig.now_s += 0.6 * ACTIVE_S
    rig.waits_s(1, principal=2)
    rig.now_s += 0.6 * ACTIVE_S
    assert rig.waits_s(2, principal=1) == pytest.approx([0.0, 2 * CALL_S]), "of the others one is forgotten"
