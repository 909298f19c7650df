"""Which states make way: those of who holds an equal share or more, in the order of use."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from deltaline_server.snapshots.owned_states import OwnedStates


class State:
    """A state, which counts how often it is looked at."""

    num_looks = 0

    def __init__(self, name: str, num_bytes: int = 1) -> None:
        """name: begins with its owner's."""
        self.owner, self.num_bytes, self.num_uses = name[0], num_bytes, 0
        self._is_pinned = False

    @property
    def is_pinned(self) -> bool:
        State.num_looks += 1
        return self._is_pinned

    @is_pinned.setter
    def is_pinned(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned


def states_of(names: str, num_bytes: int = 1) -> OwnedStates[State]:
    states = OwnedStates[State]()
    for name in names.split():
        states.add(name.encode(), State(name, num_bytes))
    return states


def victims(states: OwnedStates[State], num_bytes: int) -> str:
    return b" ".join(states.victims(num_bytes)).decode()


@pytest.mark.parametrize(
    ("names", "used", "num_bytes", "expected"),
    [
        pytest.param("a1 a2 a3", "a1", 2, "a2 a3", id="one owner's by use alone"),
        pytest.param("a1 b1 b2 b3 b4", "", 3, "b1 b2 b3", id="who holds less loses nothing"),
        pytest.param("a1 a2 b1 b2", "a1", 1, "a2", id="an equal share is no less"),
        pytest.param("a1 a2 b1 b2 b3 b4", "", 4, "b1 b2 a1 b3", id="until shares are equal"),
        pytest.param("c1 a1 a2 a3 b1 b2 b3", "a1", 3, "a2 a3 b1", id="several hold much"),
        pytest.param("a1 b1 b2", "", 9, "b1 a1 b2", id="all where that is not enough"),
        pytest.param("a1", "", 0, "", id="none for nothing"),
    ],
)
def test_victims_are_of_who_holds_much_in_the_order_of_use(
    names: str, used: str, num_bytes: int, expected: str
) -> None:
    states = states_of(names)
    if used:
        states.use(used.encode())
    assert victims(states, num_bytes) == expected and len(states) == len(names.split())


def test_who_holds_less_loses_something_only_where_nothing_else_may_go() -> None:
    states = states_of("a1 a2 b1 b2 b3 b4")
    states[b"b1"].is_pinned, states[b"b3"].num_uses, states[b"a1"].num_uses = True, 1, 1
    assert victims(states, 9) == "b2 b4 a2"


def test_bytes_count_and_not_states() -> None:
    states = states_of("a1 a2 a3")
    states.add(b"b1", State("b1", 4))
    assert victims(states, 3) == "b1"


def test_what_is_removed_counts_no_more() -> None:
    states = states_of("b1 a1 a2 a3")
    assert states.remove(b"a1").owner == "a" and list(states) == [b"b1", b"a2", b"a3"]
    states.remove(b"a2")
    assert victims(states, 1) == "b1"
    with pytest.raises(KeyError):
        states.remove(b"a1")


def test_not_all_states_are_looked_at_for_a_victim() -> None:
    states = states_of(" ".join(f"{owner}{number}" for number in range(250) for owner in "abcd"))
    State.num_looks = 0
    assert len(states.victims(5)) == 5 and State.num_looks <= 4 + 5


@pytest.mark.parametrize("seed", range(20))
def test_nobody_loses_what_a_plain_reading_of_the_rule_leaves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    states, order = OwnedStates[State](), list[bytes]()
    for number in range(40):
        name = f"{rng.choice(list('aaabbc'))}{number}"
        states.add(name.encode(), State(name, int(rng.integers(1, 5))))
        order.append(name.encode())
        states[name.encode()].is_pinned = bool(rng.integers(5) == 0)
        if rng.integers(2):
            used = order.pop(int(rng.integers(len(order))))
            order.append(used)
            states.use(used)
        if rng.integers(4) == 0:
            states.remove(order.pop(int(rng.integers(len(order)))))
    going, left = states.victims(10**9), list(order)
    for id in going:
        held = Counter[str]()
        for each in left:
            held[states[each].owner] += states[each].num_bytes
        share = Fraction(held.total(), len(held))
        idle = [each for each in left if not states[each].is_pinned]
        large = [each for each in idle if held[states[each].owner] >= share]
        assert id == (large or idle)[0]
        left.remove(id)
    assert all(states[each].is_pinned for each in left)
