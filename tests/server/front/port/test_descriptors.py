"""How many connections a port takes, by how many files the process may open."""

from __future__ import annotations

import resource

import pytest

from deltaline_server.front.port import descriptors
from deltaline_server.front.port.descriptors import MAX_CONNECTIONS, DescriptorError, connections


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The soft and the hard limit of a process that has 40 files open."""
    limits = [256, 256]

    def set_limits(_: int, values: tuple[int, int]) -> None:
        limits[:] = values

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    monkeypatch.setattr(descriptors, "num_open", lambda: 40)
    return limits


def test_connections_leave_descriptors_for_all_else(limits: list[int]) -> None:
    assert connections(1, 64) == 256 - 40 - 64 - 48 - 32
    assert connections(2, 64) == (256 - 40 - 64 - 48 - 32) // 2


def test_the_limit_is_raised_as_far_as_it_may_be(limits: list[int]) -> None:
    limits[1] = 2**20
    assert connections(1, 64) == MAX_CONNECTIONS and limits == [2**20, 2**20]


def test_a_limit_without_end_is_none(limits: list[int]) -> None:
    limits[:] = [resource.RLIM_INFINITY] * 2
    assert connections(2, 64) == MAX_CONNECTIONS // 2


def test_too_few_descriptors_are_told_with_how_many_are_enough(limits: list[int]) -> None:
    limits[:] = [128, 128]
    with pytest.raises(DescriptorError, match=r"^ulimit -n: expected at least 193 open files, got 128$"):
        connections(1, 64)
    limits[:] = [193, 193]
    assert connections(1, 64) >= descriptors.MIN_CONNECTIONS
