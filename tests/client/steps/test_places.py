"""Places where a prefill leaves states: a row is cut so that each lies on the grid of its step, or at its end."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from rigs.running_sum import tokens

from deltaline_client import InvalidWaypoint, Prefix, StepUnfinished, Unavailable, Waypoints
from deltaline_client._steps.places import MOST, Places
from deltaline_server.errors import Reason

GRID = 64


def steps_of(places: Places, most: int) -> list[tuple[int, int]]:
    """The steps that a row is cut into: where each begins, and its tokens."""
    made, start = list[tuple[int, int]](), 0
    while start < places.num_tokens:
        count = places.cut(start, min(most, places.num_tokens - start))
        assert 0 < count <= most
        made.append((start, count))
        start += count
    return made


def named(places: Places, steps: list[tuple[int, int]]) -> list[int]:
    """The positions that the requests of these steps name, each as the server takes it."""
    found = list[int]()
    for start, count in steps:
        message = places.message(0, start, count)
        if message is not None:
            assert all(0 < one <= count and one % GRID == 0 for one in message.tokens) and len(message.tokens) <= MOST
            found += [places.begin + start + one for one in (*message.tokens, *[count] * message.at_end)]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_place_is_named_once_in_order(seed: int) -> None:
    draw = Random(seed)
    for _ in range(25):
        begin, num_tokens = draw.choice((0, 0, 64, draw.randrange(500))), draw.randrange(1, 1000)
        some = draw.choice((range(1, 1500), range(64, 1500, 64)))
        waypoints = draw.choice(
            (
                Waypoints(tokens=tuple(sorted(draw.sample(some, draw.randrange(9)))), at_end=draw.random() < 0.5),
                Waypoints(every=draw.choice((64, 128, 1, 100, 2000)), at_end=draw.random() < 0.5),
            )
        )
        places = Places.of(waypoints, begin, num_tokens, GRID)
        steps = steps_of(places, draw.choice((1, 50, 64, 100, 128, 5000)))
        assert sum(count for _, count in steps) == num_tokens
        end = begin + num_tokens
        wanted = set(waypoints.tokens) | (
            set(range(waypoints.every, end + 1, waypoints.every)) if waypoints.every else set()
        )
        wanted |= {end} if waypoints.at_end else set()
        assert named(places, steps) == sorted(one for one in wanted if begin < one <= end)


@pytest.mark.parametrize(
    ("begin", "num_tokens", "waypoints", "most", "expected"),
    [
        (0, 640, Waypoints(every=64), 5000, [(0, 640)]),
        (0, 640, Waypoints(every=64), 200, [(0, 192), (192, 192), (384, 192), (576, 64)]),
        (100, 400, Waypoints(every=128), 5000, [(0, 28), (28, 372)]),
        (0, 200, Waypoints(tokens=(64, 100, 164)), 5000, [(0, 100), (100, 100)]),
        (0, 200, Waypoints(tokens=(300,), at_end=True), 5000, [(0, 200)]),
        (0, 64 * MOST + 128, Waypoints(every=64), 10**6, [(0, 64 * MOST), (64 * MOST, 128)]),
    ],
)
def test_a_row_is_cut_no_more_than_it_takes(
    begin: int, num_tokens: int, waypoints: Waypoints, most: int, expected: list[tuple[int, int]]
) -> None:
    assert steps_of(Places.of(waypoints, begin, num_tokens, GRID), most) == expected


def test_a_request_has_the_keys_of_its_own_places() -> None:
    prefix = Prefix.of_tokens(range(200), every=64)
    places = Places.of(Waypoints(tokens=(64, 100, 192), prefix=prefix, lease_s=9.0, pinned=True), 0, 200, GRID)
    first, second = places.message(3, 0, 100), places.message(0, 100, 92)
    assert first is not None and second is not None
    assert (first.row, list(first.tokens), first.at_end, first.lease_ms, first.pinned) == (3, [64], True, 9000, True)
    assert (list(first.prefix.key), list(first.prefix.position)) == ([prefix.keys[0]], [64])
    assert first.prefix.prompt_tokens == second.prefix.prompt_tokens == 200
    assert (list(second.tokens), second.at_end, list(second.prefix.position)) == ([], True, [192])
    assert places.message(0, 192, 8) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": (0, 64)}, "tokens: expected positions from 1 on, increasing"),
        ({"tokens": (64, 64)}, "tokens: "),
        ({"every": -1}, "every: expected 1 or more"),
        ({"every": 64, "tokens": (64,)}, "every: .* without `tokens`"),
        ({"lease_s": 0.0}, "lease_s: "),
    ],
)
def test_places_that_are_none(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Waypoints(**wrong)


# -- through both clients --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def grid(server: Any) -> None:
    server.info.waypoint_tokens = GRID


def test_a_prefill_tells_what_became_of_its_places(driven: Any, server: Any) -> None:
    hidden, sequence = tokens(500), driven.do(driven.client.open())
    outputs = driven.do(sequence.prefill(hidden, waypoints=Waypoints(every=100, at_end=True)))
    assert np.array_equal(outputs, hidden.cumsum(axis=0))
    assert [one.position for one in sequence.waypoints] == [100, 200, 300, 400, 500]
    assert all(one.skipped is None for one in sequence.waypoints)
    for one in sequence.waypoints[1:3]:
        child = driven.do(driven.client.open(snapshot=one.snapshot_id))
        rest = driven.do(child.prefill(hidden[one.position :], output="last"))
        assert np.array_equal(rest, outputs[-1:])
    driven.do(sequence.prefill(hidden[:5]))
    assert len(sequence.waypoints) == 5, "of the last prefill that named some"
    driven.do(sequence.prefill(hidden[:5], waypoints=Waypoints(tokens=(500, 900))))
    assert sequence.waypoints == () and sequence.position == 510
    driven.do(sequence.prefill(hidden[:200], waypoints=Waypoints(tokens=(400, 574, 600))))
    assert [one.position for one in sequence.waypoints] == [574, 600]
    last = server.requests["Step"][-2:]
    assert [list(step.waypoints[0].tokens) if step.waypoints else [] for step in last] == [[64], []]
    assert last[0].waypoints[0].at_end


def test_what_has_no_room_is_told(driven: Any, server: Any) -> None:
    server.skips = {128: "NO_SNAPSHOT_LINES"}
    sequence = driven.do(driven.client.open())
    driven.do(sequence.prefill(tokens(192), output="none", waypoints=Waypoints(every=64)))
    told = [(one.position, one.snapshot_id is None, one.skipped) for one in sequence.waypoints]
    assert told == [(64, False, None), (128, True, "NO_SNAPSHOT_LINES"), (192, False, None)]


def test_a_lost_answer_leaves_the_same_states(driven: Any, server: Any, once: Any) -> None:
    hidden, waypoints = tokens(300), Waypoints(every=64, at_end=True)
    sequence = driven.do(once.open())
    server.lose("Step")
    with pytest.raises(Unavailable):
        driven.do(sequence.prefill(hidden, waypoints=waypoints))
    with pytest.raises(StepUnfinished):
        driven.do(sequence.prefill(hidden, waypoints=Waypoints(every=128)))
    with pytest.raises(StepUnfinished):
        driven.do(sequence.prefill(hidden))
    outputs = driven.do(sequence.prefill(hidden, waypoints=waypoints))
    assert np.array_equal(outputs, hidden.cumsum(axis=0))
    assert [one.position for one in sequence.waypoints] == [64, 128, 192, 256, 300]
    assert len({one.snapshot_id for one in sequence.waypoints}) == 5 == len(server.states.kept)
    first = [step for step in server.requests["Step"] if list(step.step) == [1]]
    assert len(first) == 2 and first[0] == first[1]


def test_a_prefill_that_fails_half_way_tells_of_the_states_that_it_left(driven: Any, server: Any) -> None:
    sequence = driven.do(driven.client.open())
    server.pass_by("Step")
    server.refuse_rows({0: Reason.STATE_POISONED})
    with pytest.raises(Exception, match="STATE_POISONED"):
        driven.do(sequence.prefill(tokens(300), waypoints=Waypoints(every=64)))
    assert [one.position for one in sequence.waypoints] == [64, 128]


def test_a_server_without_waypoints_is_sent_nothing(driven: Any, server: Any) -> None:
    server.info.waypoint_tokens = 0
    sequence = driven.do(driven.client.open())
    with pytest.raises(InvalidWaypoint, match="leaves no states"):
        driven.do(sequence.prefill(tokens(3), waypoints=Waypoints(at_end=True)))
    assert not server.requests["Step"] and not sequence.progress().busy
    assert driven.do(sequence.prefill(tokens(3))).shape == (3, 8)
