"""Which cases of a parametrised test run by default where all of them take long; the others are sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest


def values_of(item: pytest.Item) -> dict[str, object]:
    """The parameters of a test's case."""
    return dict(item.callspec.params) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def cases_by_test(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases that are no sweeps already, those of each test together."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("sweep"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(tests.values())


def take_turns(items: Iterable[pytest.Item], name: str) -> None:
    """Run each test that has a parameter with one of its values: the first test with the first, the next with the
    second, and so on."""
    having = [item for item in items if name in values_of(item)]
    for turn, cases in enumerate(cases_by_test(having)):
        ids = list(dict.fromkeys(str(values_of(case)[name]) for case in cases))
        for case in cases:
            if str(values_of(case)[name]) != ids[turn % len(ids)]:
                case.add_marker(pytest.mark.sweep)


def take_every(cases: Sequence[pytest.Item], step: int) -> None:
    """Run every step-th case of a test, and beside them those with a value of a parameter that no other has."""
    taken, seen = set(cases[::step]), set[tuple[str, str]]()
    for case in [*cases[::step], *cases]:
        values = {(name, str(value)) for name, value in values_of(case).items()}
        if case in taken or not values <= seen:
            taken.add(case)
            seen |= values
    for case in cases:
        if case not in taken:
            case.add_marker(pytest.mark.sweep)
